"""Error bounds against vectors: what is promised holds for deltas of those norms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.planner.bounds import error_bound, update_norm
from mergepipe_pipeline.planner.candidates import Candidates, lay_out
from mergepipe_pipeline.planner.strategies import choose
from tests.planner.drawn import GRID, candidates, row


def nothing_normalised(c: Candidates) -> tuple[np.ndarray, np.ndarray]:
    return np.full(len(c.rows), np.nan), np.zeros(len(c.rows), np.bool_)


@given(c=candidates(), share=st.floats(0, 1))
def test_the_additive_bound_is_the_triangle_inequality_per_site(
    c: Candidates, share: float
) -> None:
    chosen = choose(c, int(share * c.nbytes.sum()), "magnitude")
    bound = error_bound(c, chosen, "additive", *nothing_normalised(c)).value
    sites: dict[int, float] = {}
    for i in np.flatnonzero(~chosen & ~c.zero):
        sites[int(c.site[i])] = sites.get(int(c.site[i]), 0.0) + abs(c.coefficient[i]) * c.norm[i]
    assert bound == pytest.approx(sum(v * v for v in sites.values()) ** 0.5, abs=1e-12)


@pytest.mark.parametrize("response", ["additive", "vote", "unbounded"])
@given(c=candidates())
def test_a_plan_that_omits_nothing_has_no_error(response: str, c: Candidates) -> None:
    bound = error_bound(c, ~c.zero, response, *nothing_normalised(c))  # type: ignore[arg-type]
    assert bound.value == 0.0


def test_what_changes_other_places_has_no_bound() -> None:
    c = lay_out([row(1.0, 1.0)], GRID)
    bound = error_bound(c, np.zeros(2, np.bool_), "unbounded", *nothing_normalised(c))
    assert bound.value is None
    assert "other" in bound.note


def test_an_omitted_adapter_counts_with_all_of_its_blocks() -> None:
    c = lay_out([row(9.0, 16.0, bundle_nbytes=10), row(1.0, 1.0)], GRID)
    chosen = np.array([False, False, True, True])
    assert error_bound(c, chosen, "additive", *nothing_normalised(c)).value == pytest.approx(5.0)


def test_a_normalised_vote_with_negative_weights_has_no_bound() -> None:
    c = lay_out([row(1.0, 1.0)], GRID)
    bound = error_bound(c, np.zeros(2, np.bool_), "vote", np.ones(1), np.ones(1, np.bool_))
    assert bound.value is None
    assert "negative" in bound.note


def test_the_update_norm_is_that_of_orthogonal_deltas() -> None:
    c = lay_out([row(9.0, 16.0, bundle_nbytes=10), row(11.0)], GRID)
    assert update_norm(c) == pytest.approx(6.0)
