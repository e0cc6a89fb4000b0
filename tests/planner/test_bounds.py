"""Error bounds against vectors: what is promised holds for deltas of those norms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.operator import Response
from mergepipe_pipeline.planner.bounds import Bound, Sensitivity, error_bound
from mergepipe_pipeline.planner.candidates import Candidates, Choice, lay_out
from mergepipe_pipeline.planner.levels import LevelTable
from tests.planner.drawn import (
    GRID,
    Floats,
    candidates,
    choose,
    constraints,
    known,
    left_out,
    originals,
    row,
)
from tests.support.oracles import elected


def bound_of(c: Candidates, choice: Choice, given: dict[int, Sensitivity]) -> Bound:
    """The bound of a choice of whole blocks."""
    return error_bound(LevelTable(c), originals(choice), given)


def sensitivities(
    c: Candidates, response: Response, reach: float = np.nan, *, has_divisor_zero: bool = False
) -> dict[int, Sensitivity]:
    """The same answer for all tensors."""
    counts = np.bincount([r.tensor for r in c.rows])
    return {
        n: Sensitivity(response, np.full(count, reach), has_divisor_zero)
        for n, count in enumerate(counts)
    }


@given(c=candidates(), share=st.floats(0, 1))
def test_the_additive_bound_is_the_triangle_inequality_per_site(
    c: Candidates, share: float
) -> None:
    chosen = choose(c, constraints(c, int(share * c.nbytes.sum())), "magnitude")
    bound = bound_of(c, chosen, sensitivities(c, "additive")).value
    by_out_block: dict[int, float] = {}
    for i in np.flatnonzero(~chosen & ~c.zero):
        number = int(c.out_block[i])
        change = abs(c.coefficient[i]) * c.norm[i]
        by_out_block[number] = by_out_block.get(number, 0.0) + change
    assert bound == pytest.approx(sum(v * v for v in by_out_block.values()) ** 0.5, abs=1e-12)


def drawn(seed: int) -> tuple[Candidates, Floats, Choice]:
    """A tensor of a few experts, their deltas [E, blocks, 64], and a choice of blocks."""
    rng = np.random.default_rng(seed)
    experts, blocks = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    deltas = rng.standard_t(3, (experts, blocks, 64)) * rng.choice([0.1, 1], (experts, blocks, 1))
    c = lay_out(known(deltas, rng.normal(size=experts).tolist()), GRID)
    return c, deltas, rng.random(len(c.row)) < rng.random()


def covered(deltas: Floats, choice: Choice) -> Floats:
    """The deltas with zeros in place of what is not read."""
    chosen: Floats = deltas * choice.reshape(deltas.shape[:2])[:, :, None]
    return chosen


@given(seed=st.integers(0, 2**32))
def test_a_sum_errs_less_than_its_bound(seed: int) -> None:
    c, deltas, choice = drawn(seed)
    bound = bound_of(c, choice, sensitivities(c, "additive")).value
    assert bound is not None
    assert left_out(c, deltas, choice) ** 0.5 <= bound * (1 + 1e-9)


@given(seed=st.integers(0, 2**32))
def test_a_vote_that_adds_errs_less_than_its_bound(seed: int) -> None:
    c, deltas, choice = drawn(seed)
    weights = np.array([r.coefficient for r in c.rows])[:, None, None]
    full, part = (
        (d * elected(d)).sum(axis=0) for d in (weights * deltas, weights * covered(deltas, choice))
    )
    bound = bound_of(c, choice, sensitivities(c, "vote")).value
    assert bound is not None
    assert np.linalg.norm(full - part) <= bound * (1 + 1e-9)


@given(seed=st.integers(0, 2**32), vote=st.booleans(), density=st.floats(0.05, 1))
def test_a_mean_errs_less_than_its_bound(seed: int, vote: bool, density: float) -> None:
    c, deltas, choice = drawn(seed)
    rng = np.random.default_rng(seed)
    weights, reach = rng.uniform(0.1, 2, (len(deltas), 1, 1)), float(rng.uniform(0.2, 2))
    least = np.quantile(np.abs(deltas), 1 - density, axis=(1, 2))
    kept = np.where(np.abs(deltas) >= least[:, None, None], deltas, 0.0)

    def mean(d: Floats) -> Floats:
        takes_part = elected(weights * d) if vote else d != 0
        divisor = (weights * takes_part).sum(axis=0)
        total: Floats = (weights * d * takes_part).sum(axis=0)
        return reach * total / np.where(divisor == 0, 1.0, divisor)

    caps = np.square(kept).sum(axis=(1, 2))
    rows = [replace(r, kept_sq_norm=float(e)) for r, e in zip(c.rows, caps, strict=True)]
    c = lay_out(rows, GRID)
    bound = bound_of(c, choice, sensitivities(c, "vote" if vote else "mean", reach)).value
    assert bound is not None
    assert np.linalg.norm(mean(kept) - mean(covered(kept, choice))) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("response", ["additive", "vote", "mean", "unbounded"])
@given(c=candidates())
def test_a_plan_that_omits_nothing_has_no_error(response: Response, c: Candidates) -> None:
    assert bound_of(c, ~c.zero, sensitivities(c, response)).value == 0.0


def test_what_changes_other_places_has_no_bound() -> None:
    c = lay_out([row(1.0, 1.0)], GRID)
    bound = bound_of(c, np.zeros(2, np.bool_), sensitivities(c, "unbounded"))
    assert bound.value is None
    assert "other" in bound.note


def test_a_tensor_without_a_bound_does_no_harm_while_it_is_bought_whole() -> None:
    c = lay_out([row(1.0, 1.0), row(4.0, tensor=1)], GRID)
    mixed = sensitivities(c, "additive") | {0: Sensitivity("unbounded", np.full(1, np.nan), False)}
    chosen = np.array([True, True, False])
    assert bound_of(c, chosen, mixed).value == pytest.approx(2.0)
    assert bound_of(c, ~chosen, mixed).value is None


def test_an_omitted_adapter_counts_with_all_of_its_blocks() -> None:
    c = lay_out([row(9.0, 16.0, bundle_nbytes=10), row(1.0, 1.0)], GRID)
    chosen = np.array([False, False, True, True])
    assert bound_of(c, chosen, sensitivities(c, "additive")).value == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("response", "reach"), [("additive", np.nan), ("vote", np.nan), ("mean", 1)]
)
def test_nothing_is_promised_where_what_is_left_out_is_not_finite(
    response: Response, reach: float
) -> None:
    c = lay_out([replace(row(9.0, 9.0), block_l2sq=np.array([1.0, np.nan]))], GRID)
    given, first = sensitivities(c, response, reach), np.array([True, False])
    bounds = [bound_of(c, choice, given) for choice in (first, ~first)]
    assert [b.value for b in bounds] == [None, pytest.approx(1.0)]
    assert "NaN" in bounds[0].note


def test_a_normalised_vote_with_negative_weights_has_no_bound() -> None:
    c = lay_out([row(1.0, 1.0)], GRID)
    bound = bound_of(c, np.zeros(2, np.bool_), sensitivities(c, "vote", 1.0, has_divisor_zero=True))
    assert bound.value is None
    assert "negative" in bound.note


def test_the_note_names_the_argument_of_every_part() -> None:
    c = lay_out([row(1.0), row(1.0, tensor=1)], GRID)
    mixed = {0: sensitivities(c, "additive")[0], 1: sensitivities(c, "mean", 1.0)[1]}
    bound = bound_of(c, np.zeros(2, np.bool_), mixed)
    assert bound.note == "reach of the means and triangle inequality"
