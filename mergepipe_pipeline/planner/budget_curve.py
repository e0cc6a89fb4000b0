"""What every budget would lose: predicted error and bound over bytes, for all strategies.

Solves the problem that a plan solves for one budget at many budgets at once; every strategy makes
its list of items once. From statistics alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np

from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.planner.selection import (
    PlanningProblem,
    Prediction,
    Selection,
    levels_for,
)
from mergepipe_pipeline.planner.strategies import PACKS, STRATEGIES

#: Shares of the expert bytes that a curve is drawn at.
SHARES = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, *(n / 10 for n in range(3, 11)))
#: How far below its chord a curve has to hang for a knee, as a share of its height.
_LEAST_BEND = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A strategy's promise for one budget: `nbytes` are read of `budget_bytes` (None: all).

    `error` estimates ‖W_budget − W_full‖₂ give or take `margin` (None: not stated); `bound` is an
    upper limit, None where none is known.
    """

    strategy: str
    budget_bytes: int | None
    nbytes: int
    error: float
    margin: float | None
    bound: float | None


@dataclass(frozen=True, kw_only=True)
class BudgetCurve:
    """Points strategy by strategy, budgets ascending; `chosen` is the one that was asked for.

    `nbytes_total` are the experts' bytes, `update_norm` the predicted ‖W_full − W_none‖₂, the error
    with nothing read: W_none is the base, or where weights do not sum to one a multiple of it. The
    knee is on the curve of strategy `best`; without one that curve is nearly straight. `left_out`
    are the shares that do not cover what the recipe pins, whatever the strategy.
    """

    nbytes_total: int
    update_norm: float
    points: tuple[Point, ...]
    chosen: Point
    best: str
    knee: Point | None
    left_out: tuple[float, ...]

    def of(self, strategy: str) -> tuple[Point, ...]:
        """The points of one strategy."""
        return tuple(p for p in self.points if p.strategy == strategy)

    @property
    def is_known(self) -> bool:
        """Whether the update has a norm: it has none where an expert holds NaN or infinity."""
        return isfinite(self.update_norm)

    def relative(self, error: float | None) -> float | None:
        """An error as a share of the update; None where there is none, or no share of it."""
        has_share = error is not None and 0 < self.update_norm < inf
        return error / self.update_norm if error is not None and has_share else None


def budget_curve(
    problems: Sequence[PlanningProblem],
    budget: Budget,
    chosen: Selection,
    shares: Sequence[float] = SHARES,
) -> BudgetCurve:
    """Draw the curve at `shares` of the expert bytes, none and all.

    `chosen` was selected for `budget`. Strategies are drawn as their own lists have it: that of
    packs for a problem with packs, the others for one without. Budgets that do not cover what the
    recipe pins are left out. Raises BudgetError where there is no base to differ from.
    """
    total = chosen.problem.candidates.total_nbytes
    budgets = {
        s: replace(budget, nbytes=None, error=None, fraction=s) for s in sorted({0.0, *shares, 1.0})
    }
    points = [
        point
        for q in problems
        for strategy in STRATEGIES
        if (strategy == PACKS) == q.has_packs
        for point in _points(q, strategy, [*budgets.values()])
    ]
    best = chosen.strategy if chosen.strategy in STRATEGIES else chosen.problem.usual_strategy
    points.sort(key=lambda p: p.strategy != best)
    drawn = {p.budget_bytes for p in points}
    own, update = chosen.problem.predict([chosen.levels, np.zeros_like(chosen.levels)]) or []
    return BudgetCurve(
        nbytes_total=total,
        update_norm=update.error,
        points=tuple(points),
        chosen=_point(
            chosen, budget.resolve(total), own, chosen.problem.read_nbytes(chosen.levels)
        ),
        best=best,
        knee=knee_of([p for p in points if p.strategy == best]),
        left_out=tuple(s for s, b in budgets.items() if b.resolve(total) not in drawn),
    )


def _points(q: PlanningProblem, strategy: str, budgets: Sequence[Budget]) -> list[Point]:
    """The points of one strategy."""
    total = q.candidates.total_nbytes
    made = [(b, Selection(q, strategy, levels)) for b, levels in levels_for(q, strategy, budgets)]
    predictions = q.predict([s.levels for _, s in made]) or []
    return [
        _point(selection, b.resolve(total), prediction)
        for (b, selection), prediction in zip(made, predictions, strict=True)
    ]


def _point(
    s: Selection, budget_bytes: int | None, prediction: Prediction, nbytes: int | None = None
) -> Point:
    """A point of so many bytes; by default what blocks cost one by one, at most all there are."""
    if nbytes is None:
        own = int(s.problem.table.nbytes(s.levels).sum())
        nbytes = min(own, s.problem.candidates.total_nbytes)
    return Point(
        strategy=s.strategy,
        budget_bytes=budget_bytes,
        nbytes=nbytes,
        error=prediction.error,
        margin=prediction.margin,
        bound=s.problem.bound(s.levels).value,
    )


def knee_of(points: Sequence[Point]) -> Point | None:
    """The point that hangs farthest below the chord from the first to the last point.

    Such a point is a corner of the curve's lower convex hull: before it a byte saves more than on
    average, after it less (the "kneedle" rule, Satopää et al. 2011, without smoothing).
    """
    if len(points) < 3:
        return None
    nbytes = np.array([p.nbytes for p in points], np.float64)
    error = np.array([p.error for p in points])
    width, height = nbytes[-1] - nbytes[0], error[0] - error[-1]
    if not width > 0 or not 0 < height < inf:
        return None
    with np.errstate(over="ignore"):  # a fall of next to nothing: points may be infinitely above
        sag = 1 - (nbytes - nbytes[0]) / width - (error - error[-1]) / height
    at = int(sag.argmax())
    return points[at] if sag[at] > _LEAST_BEND else None
