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
from mergepipe_pipeline.planner.candidates import Choice
from mergepipe_pipeline.planner.items import spend
from mergepipe_pipeline.planner.level_selection import (
    PACKS,
    LevelProblem,
    LevelSelection,
    levels_for,
)
from mergepipe_pipeline.planner.levels import Levels
from mergepipe_pipeline.planner.predict import Prediction, predict
from mergepipe_pipeline.planner.selection import BlockSelection, PlanningProblem
from mergepipe_pipeline.planner.strategies import (
    STRATEGIES,
    allowed,
    is_affordable,
    rank,
    refuse_without_base,
)

#: Shares of the expert bytes that a curve is drawn at.
SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, *(n / 10 for n in range(3, 11)))
#: How far below its chord a curve has to hang for a knee, as a share of its height.
_LEAST_BEND = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a strategy promises for one budget: `nbytes` are read of `budget_bytes` (None: all).

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
    q: PlanningProblem,
    budget: Budget,
    chosen: BlockSelection | LevelSelection,
    shares: Sequence[float] = SHARES,
    packed: LevelProblem | None = None,
) -> BudgetCurve:
    """The curve at `shares` of the expert bytes, none and all; `chosen` was selected for `budget`.

    Strategies are drawn as their own lists have it, that of packs where experts have some. Budgets
    that do not cover what the recipe pins are left out. Raises BudgetError where there is no base
    to differ from.
    """
    c = q.candidates
    refuse_without_base(c, int(c.nbytes.sum()), 0)
    total = int(c.nbytes.sum())
    named = PACKS if isinstance(chosen, LevelSelection) else chosen.strategy
    best = named if named in (PACKS, *STRATEGIES) else q.usual_strategy
    budgets = {
        s: replace(budget, nbytes=None, error=None, fraction=s) for s in sorted({0.0, *shares, 1.0})
    }
    points = _block_points(q, [*budgets.values()])
    points += _level_points(packed, [*budgets.values()]) if packed else []
    points.sort(key=lambda p: p.strategy != best)
    drawn = {p.budget_bytes for p in points}
    # As the plan's promise: nearer than the curve, and too slow for all of it.
    none = np.zeros(len(c.row), np.bool_)
    if isinstance(chosen, LevelSelection):
        (update,) = predict(c, [none], replay=True) or []
        (own,) = chosen.problem.predict([chosen.levels]) or []
        point = _level_point(chosen.problem, budget.resolve(total), chosen.levels, own)
    else:
        blocks, update = predict(c, [chosen.choice, none], replay=True) or []
        point = _point(q, chosen.strategy, budget.resolve(total), chosen.choice, blocks)
    return BudgetCurve(
        nbytes_total=total,
        update_norm=update.error,
        points=tuple(points),
        chosen=point,
        best=best,
        knee=knee_of([p for p in points if p.strategy == best]),
        left_out=tuple(s for s, b in budgets.items() if b.resolve(total) not in drawn),
    )


def _block_points(q: PlanningProblem, budgets: Sequence[Budget]) -> list[Point]:
    """The points of all strategies that buy whole blocks."""
    c, total = q.candidates, int(q.candidates.nbytes.sum())
    cases = [(name, budget) for name in STRATEGIES for budget in budgets]
    made = [
        (name, b, choice)
        for (name, b), choice in zip(cases, _choices(q, cases), strict=True)
        if choice is not None
    ]
    predictions = predict(c, [choice for _, _, choice in made]) or []
    return [
        _point(q, name, b.resolve(total), choice, prediction)
        for (name, b, choice), prediction in zip(made, predictions, strict=True)
    ]


def _level_points(q: LevelProblem, budgets: Sequence[Budget]) -> list[Point]:
    """The points of the strategy that buys levels."""
    total = int(q.candidates.nbytes.sum())
    made = [(b.resolve(total), levels) for b, levels in levels_for(q, budgets)]
    errors = q.predict([levels for _, levels in made]) or []
    return [
        _level_point(q, nbytes, levels, error)
        for (nbytes, levels), error in zip(made, errors, strict=True)
    ]


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


def _choices(q: PlanningProblem, cases: Sequence[tuple[str, Budget]]) -> list[Choice | None]:
    """What each strategy covers under each budget; None where the pins alone cost more."""
    c = q.candidates
    ranked = {}
    out: list[Choice | None] = []
    for strategy, budget in cases:
        constraints = q.constraints(budget)
        useful = allowed(c, constraints)
        if int(c.nbytes[constraints.pinned & ~c.zero].sum()) > constraints.budget_bytes:
            out.append(None)
        elif is_affordable(c, useful, constraints):
            out.append(useful)
        else:
            if strategy not in ranked:
                ranked[strategy] = rank(c, strategy, useful & ~constraints.pinned)
            out.append(spend(c, *ranked[strategy], constraints))
    return out


def _point(
    q: PlanningProblem,
    strategy: str,
    budget_bytes: int | None,
    choice: Choice,
    prediction: Prediction,
) -> Point:
    nbytes = int(q.candidates.nbytes[choice].sum())
    bound = q.bound(choice).value
    return Point(
        strategy=strategy,
        budget_bytes=budget_bytes,
        nbytes=nbytes,
        error=prediction.error,
        margin=prediction.margin,
        bound=bound,
    )


def _level_point(q: LevelProblem, budget_bytes: int | None, levels: Levels, error: float) -> Point:
    return Point(
        strategy=PACKS,
        budget_bytes=budget_bytes,
        nbytes=int(q.table.nbytes(levels).sum()),
        error=error,
        margin=None,
        bound=q.bound(levels).value,
    )
