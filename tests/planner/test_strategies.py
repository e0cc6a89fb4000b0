"""What a budget buys: every strategy within it, deterministic, and everything when it suffices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.bounds import error_bound
from mergepipe_pipeline.planner.candidates import Candidates, Row, lay_out
from mergepipe_pipeline.planner.strategies import STRATEGIES, choose
from mergepipe_pipeline.spec.blocks import BlockGrid

PARTIAL = [s for s in STRATEGIES if s != "full"]


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    """Rows over a few tensors and experts with random norms, some blocks all zero."""
    grid = BlockGrid(4096)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for tensor in range(draw(st.integers(1, 4))):
        numel = draw(st.integers(1, 30_000))
        for position in range(draw(st.integers(1, 4))):
            n = grid.count(numel)
            alive = rng.random(n) > 0.2
            l2sq = rng.random(n) * alive
            rows.append(
                Row(
                    tensor,
                    position,
                    f"t{tensor}#{position}",
                    numel,
                    int(rng.choice([1, 2, 4])),
                    float(rng.normal()),
                    l2sq,
                    np.sqrt(l2sq).astype(np.float32),
                    alive.astype(np.int64),
                )
            )
    return lay_out(rows, grid)


@pytest.mark.parametrize("strategy", PARTIAL)
@given(c=candidates(), share=st.floats(0, 1))
def test_a_choice_stays_within_the_budget_and_never_pays_for_zeros(
    strategy: str, c: Candidates, share: float
) -> None:
    budget = int(share * c.nbytes.sum())
    chosen = choose(c, budget, strategy)
    assert c.nbytes[chosen].sum() <= budget
    assert not (chosen & c.zero).any()
    assert (choose(c, budget, strategy) == chosen).all()


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@given(c=candidates())
def test_a_budget_that_suffices_buys_everything_useful(strategy: str, c: Candidates) -> None:
    needed = int(c.nbytes[~c.zero].sum())
    for budget in (None, needed, needed + 1):
        assert (choose(c, budget, strategy) == ~c.zero).all()


@given(c=candidates(), share=st.floats(0, 1))
def test_magnitude_leaves_nothing_that_still_fits(c: Candidates, share: float) -> None:
    budget = int(share * c.nbytes.sum())
    chosen = choose(c, budget, "magnitude")
    left = budget - int(c.nbytes[chosen].sum())
    assert (c.nbytes[~chosen & ~c.zero] > left).all()


@given(c=candidates(), share=st.floats(0, 1))
def test_the_additive_bound_is_the_triangle_inequality_per_site(
    c: Candidates, share: float
) -> None:
    chosen = choose(c, int(share * c.nbytes.sum()), "magnitude")
    none = np.full(len(c.rows), np.nan)
    bound = error_bound(c, chosen, "additive", none, np.zeros(len(c.rows), np.bool_)).value
    sites: dict[int, float] = {}
    for i in np.flatnonzero(~chosen & ~c.zero):
        sites[int(c.site[i])] = sites.get(int(c.site[i]), 0.0) + abs(c.coefficient[i]) * c.norm[i]
    assert bound == pytest.approx(sum(v * v for v in sites.values()) ** 0.5, abs=1e-12)


def test_the_full_strategy_refuses_a_budget_that_is_too_small() -> None:
    row = Row(0, 0, "t#0", 8192, 2, 1.0, np.ones(2), np.ones(2, np.float32), np.ones(2, np.int64))
    with pytest.raises(BudgetError, match="at least 16384 bytes, found 100 bytes"):
        choose(lay_out([row], BlockGrid(4096)), 100, "full")


def test_a_normalised_vote_with_negative_weights_has_no_bound() -> None:
    row = Row(0, 0, "t#0", 8192, 2, 1.0, np.ones(2), np.ones(2, np.float32), np.ones(2, np.int64))
    c = lay_out([row], BlockGrid(4096))
    bound = error_bound(c, np.zeros(2, np.bool_), "vote", np.ones(1), np.ones(1, np.bool_))
    assert bound.value is None
    assert "negative" in bound.note
