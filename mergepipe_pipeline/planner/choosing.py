"""From a recipe's budget to the blocks bought, and to what that promises.

An amount of bytes is spent at once. An error to reach is searched for: the fewest offers from the
top of the list whose bound is within it. Where a vote's bound rises before it falls, they are a
number of offers that are enough, of which one less is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.bounds import Answer, Bound, error_bound
from mergepipe_pipeline.planner.candidates import Candidates, Choice
from mergepipe_pipeline.planner.limits import Names, limits_of
from mergepipe_pipeline.planner.offers import Limits, spend
from mergepipe_pipeline.planner.predict import Prediction, predict
from mergepipe_pipeline.planner.strategies import (
    choose,
    rank,
    refuse_dear_pins,
    refuse_without_base,
)
from mergepipe_pipeline.spec.plan import Estimates
from mergepipe_pipeline.spec.recipe import Budget


@dataclass(frozen=True)
class Question:
    """What is to be bought from: candidates, how their tensors answer, and names by number."""

    candidates: Candidates
    answers: dict[int, Answer]
    tensors: Sequence[str]
    experts: Sequence[Names]
    seek_nbytes: int = 0

    def bound(self, choice: Choice) -> Bound:
        """The bound of a choice."""
        return error_bound(self.candidates, choice, self.answers)

    def limits(self, budget: Budget) -> Limits:
        """What a budget allows."""
        return limits_of(budget, self.candidates, self.tensors, self.experts)


def bought(q: Question, budget: Budget, strategy: str) -> Choice:
    """The candidates that a budget buys. Raises BudgetError as `choose` does.

    Raises it too for an error that cannot be promised.
    """
    limits = q.limits(budget)
    if budget.error is None or strategy == "full":
        return choose(q.candidates, limits, strategy, q.seek_nbytes)
    return _for_error(q, limits, budget.error, strategy)


def _for_error(q: Question, limits: Limits, error: float, strategy: str) -> Choice:
    c = q.candidates
    everything = choose(c, limits, strategy, q.seek_nbytes)
    refuse_without_base(c, int(c.nbytes[everything].sum()), 0)
    refuse_dear_pins(c, limits)
    none = np.zeros(len(c.row), np.bool_)
    update = (predict(c, [none]) or [Prediction(0.0, None)])[0]
    allowed = error * max(0.0, update.error - (update.margin or 0.0))
    _refuse_unbounded(q.bound(none), error)
    _refuse_out_of_reach(q.bound(everything), error, allowed)
    offers, order = rank(c, strategy, everything & ~limits.pinned, q.seek_nbytes)
    # The first `low` offers are too few, the first `high` enough.
    low, high, best = -1, len(order) + 1, everything
    while high - low > 1:
        middle = (low + high) // 2
        choice = spend(c, offers, order[:middle], limits)
        value = q.bound(choice).value
        if value is not None and value <= allowed:
            high, best = middle, choice
        else:
            low = middle
    return best


def _refuse_unbounded(bound: Bound, error: float) -> None:
    if bound.value is None:
        raise BudgetError(
            "This merge has no error bound, so no error can be promised",
            where="budget, error",
            expected="a method whose error is bounded",
            found=f"error {error}: {bound.note}",
            next_step="give a limit in bytes or percent, or choose another method",
        )


def _refuse_out_of_reach(least: Bound, error: float, allowed: float) -> None:
    if least.value is not None and least.value > allowed:
        raise BudgetError(
            "What the recipe lets a plan read is not enough for its error",
            where="budget, error",
            expected=f"a bound of at most {allowed:.6g} (error {error})",
            found=f"{least.value:.6g} with everything that is allowed",
            next_step="exclude less, raise the shares, or allow a larger error",
        )


def estimates(q: Question, budget: Budget, strategy: str, choice: Choice) -> Estimates:
    """What a choice costs and promises."""
    c = q.candidates
    bound = q.bound(choice)
    found = predict(c, [choice, np.zeros(len(c.row), np.bool_)], replay=True)
    units = np.bincount(c.unit, choice, c.n_units) > 0
    starts = choice & ~np.concatenate([[False], choice[:-1] & (np.diff(c.row) == 0)])
    return Estimates(
        budget_bytes=budget.resolve(int(c.nbytes.sum())),
        strategy=strategy,
        block_elems=c.grid.block_elems,
        expert_bytes_total=int(c.nbytes.sum()),
        expert_bytes_planned=int(c.nbytes[choice].sum()),
        blocks_total=c.n_units,
        blocks_bought=int(units.sum()),
        blocks_zero=int(c.unit_zero.sum()),
        reads=int(starts.sum()),
        error_bound=bound.value,
        bound_note=bound.note,
        predicted_error=_finite(found[0].error) if found else None,
        predicted_margin=found[0].margin if found else None,
        update_norm=_finite(found[1].error) if found else None,
    )


def _finite(norm: float) -> float | None:
    return norm if math.isfinite(norm) else None
