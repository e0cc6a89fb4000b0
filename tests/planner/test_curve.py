"""Budget curves: every point is what a plan would say, and the knee is where it bends most."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.recipe import Budget, Share
from mergepipe_pipeline.domain.recipe import Selection as Some
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.budget_curve import Point, budget_curve, knee_of
from mergepipe_pipeline.planner.candidates import lay_out
from mergepipe_pipeline.planner.packed_rows import ORIGINAL
from mergepipe_pipeline.planner.selection import Selection, estimates, select
from tests.planner.drawn import GRID, problem_of, row
from tests.planner.test_selection import SEEDS, problem

pytestmark = pytest.mark.usefixtures("baselines")

BEST = "magnitude"
NAMES = ("magnitude", "hash", "drop-experts")
SHARES = (0.05, 0.3, 0.7)
BUDGETS = (
    Budget(fraction=0.2),
    Budget(nbytes=50_000, exclude=(Some(("code",)),)),
    Budget(fraction=0.5, pin=(Some(("math",), ("embed",)),)),
    Budget(fraction=0.4, shares=(Share("c*", fraction=0.3),)),
)


def point(nbytes: int, error: float) -> Point:
    return Point(
        strategy=BEST, budget_bytes=nbytes, nbytes=nbytes, error=error, margin=None, bound=None
    )


@given(seed=SEEDS, budget=st.sampled_from(BUDGETS), strategy=st.sampled_from(NAMES))
def test_every_point_is_what_a_plan_of_its_budget_promises(
    seed: int, budget: Budget, strategy: str
) -> None:
    q = problem(seed)
    selection = select(q, replace(budget, fraction=1.0, nbytes=None), strategy)
    found = budget_curve([q], budget, selection, SHARES)
    drawn = {(p.strategy, p.budget_bytes): p for p in found.points}
    for name in NAMES:
        for share in (0.0, *SHARES, 1.0):
            mine = replace(budget, fraction=share, nbytes=None)
            try:
                wanted = estimates(select(q, mine, name), mine)
            except BudgetError:
                assert (name, mine.resolve(found.nbytes_total)) not in drawn
                continue
            p = drawn.pop((name, wanted.budget_bytes))
            assert p.nbytes == wanted.expert_bytes_planned
            assert p.error == pytest.approx(wanted.predicted_error)
            assert p.margin == pytest.approx(wanted.predicted_margin)
            assert p.bound == pytest.approx(wanted.error_bound)
            assert found.update_norm == pytest.approx(wanted.update_norm)
    assert drawn == {}


@given(seed=SEEDS)
def test_the_chosen_point_is_the_choice_that_was_made(seed: int) -> None:
    q, budget = problem(seed), Budget(fraction=0.35)
    selection = select(q, budget, "hash")
    found = budget_curve([q], budget, selection, SHARES).chosen
    wanted = estimates(selection, budget)
    assert (found.strategy, found.budget_bytes) == ("hash", wanted.budget_bytes)
    assert found.nbytes == wanted.expert_bytes_planned
    assert found.error == pytest.approx(wanted.predicted_error)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 100)), min_size=3, max_size=20))
@example([(0, 1.0), (0, 2.225073858507203e-309), (1, 0.0)])
def test_the_knee_is_the_point_farthest_below_the_chord(pairs: list[tuple[int, float]]) -> None:
    points = [point(x, y) for x, y in sorted(pairs)]
    first, last = points[0], points[-1]
    knee = knee_of(points)
    if last.nbytes == first.nbytes or first.error <= last.error:
        assert knee is None
        return

    def below(p: Point) -> float:
        part = (p.nbytes - first.nbytes) / (last.nbytes - first.nbytes)
        return (first.error + part * (last.error - first.error) - p.error) / (
            first.error - last.error
        )

    deepest = max(map(below, points))
    if knee is None:
        assert deepest <= 0.01 + 1e-6
    else:
        assert below(knee) == pytest.approx(deepest)


def test_a_straight_line_has_no_knee_and_a_corner_has_one() -> None:
    assert knee_of([point(n, 100.0 - n) for n in range(0, 101, 10)]) is None
    corner = [point(0, 100), point(10, 20), point(50, 10), point(100, 0)]
    assert knee_of(corner) == corner[1]
    assert knee_of(corner[:2]) is None


def test_budgets_that_do_not_cover_the_pins_have_no_point() -> None:
    q = problem(3)
    pinned = Budget(pin=(Some(("math",)),))
    selection = select(q, pinned, BEST)
    c = q.candidates
    cost = int(c.nbytes[(c.expert == 0) & ~c.zero].sum())
    found = budget_curve([q], pinned, selection, SHARES)
    assert found.of(BEST)
    assert all(p.nbytes >= cost for p in found.points)
    assert min(p.budget_bytes or 0 for p in found.points) >= cost


def test_without_a_base_there_is_no_curve() -> None:
    rows = [replace(row(1.0, 2.0), block_l2sq=None, block_nonzero=None)]
    q = problem_of(lay_out(rows, GRID))
    selection = Selection(q, BEST, np.full(2, ORIGINAL, np.int8))
    with pytest.raises(BudgetError, match="needs a base model"):
        budget_curve([q], Budget(), selection)
