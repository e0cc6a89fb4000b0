"""From a recipe's budget to the blocks selected, and to what they promise.

An amount of bytes is spent at once. An error to reach is searched for: the fewest items from the
top of the list whose bound is within it. Where a vote's bound rises before it falls, they are a
number of items that are enough, of which one less is not.

Here is also the default strategy, and here `conflict_aware` has to show on samples that it is
better than `magnitude` where it went by samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.domain.plan import Estimates
from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.bounds import Bound, Sensitivity, error_bound
from mergepipe_pipeline.planner.candidates import Candidates, Choice
from mergepipe_pipeline.planner.constraints import Constraints, Names, constraints_of
from mergepipe_pipeline.planner.items import spend
from mergepipe_pipeline.planner.predict import Prediction, predict, try_choices
from mergepipe_pipeline.planner.strategies import (
    choose,
    rank,
    refuse_dear_pins,
    refuse_without_base,
)


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """What can be read (candidates), how tensors respond to omission, and names by number."""

    candidates: Candidates
    sensitivities: dict[int, Sensitivity]
    tensors: Sequence[str]
    experts: Sequence[Names]

    @property
    def usual_strategy(self) -> str:
        """The strategy of a recipe that names none: `conflict_aware` for sums of deltas.

        For votes and means it is `magnitude`. Their error is least with all experts at few places
        and none elsewhere, where the update is then missing whole. A choice that is spread gives a
        part of it everywhere, and noise, which trained models bear better
        (docs/benchmarks.md).
        """
        return "magnitude" if self.candidates.simulations else "conflict_aware"

    def bound(self, choice: Choice) -> Bound:
        """The bound of a choice."""
        return error_bound(self.candidates, choice, self.sensitivities)

    def constraints(self, budget: Budget) -> Constraints:
        """What a budget allows."""
        return constraints_of(budget, self.candidates, self.tensors, self.experts)


@dataclass(frozen=True)
class BlockSelection:
    """The candidates selected under `strategy`; `ranking`: the strategy whose list was followed.

    `predictions` are of the choice and of the base alone, where selecting made them.
    """

    strategy: str
    ranking: str
    choice: Choice
    predictions: list[Prediction] | None = None


def select_blocks(q: PlanningProblem, budget: Budget, strategy: str | None) -> BlockSelection:
    """Select what a budget covers; raises BudgetError as `choose` does.

    It raises it too for an error that cannot be promised. `strategy` None is the usual one; but for
    `magnitude` where it would end farther from the full merge than the base is: the mean of few of
    very many experts is larger than that of all, and `conflict_aware` knows.
    """
    c, name = q.candidates, strategy or q.usual_strategy
    is_default = strategy is None and name == "magnitude"
    if c.simulations is None or not (is_default or name == "conflict_aware"):
        return BlockSelection(name, name, _listed(q, budget, name))
    plain = _listed(q, budget, "magnitude")
    if is_default:
        if (plain | c.zero).all():
            return BlockSelection(name, name, plain)
        trial = try_choices(c, [plain, np.zeros_like(plain)])
        if not trial.is_nearer(1, 0):
            return BlockSelection(name, name, plain, trial.predictions)
    choice, name = _listed(q, budget, "conflict_aware"), "conflict_aware"
    if np.array_equal(choice, plain) or _is_better(q, budget, choice, plain):
        return BlockSelection(name, name, choice)
    return BlockSelection(name, "magnitude", plain)


def _is_better(q: PlanningProblem, budget: Budget, choice: Choice, plain: Choice) -> bool:
    """Whether what was fitted to samples is certainly better than what needed none."""
    if budget.error is not None:
        nbytes = q.candidates.nbytes
        return bool(nbytes[choice].sum() < nbytes[plain].sum())
    return try_choices(q.candidates, [choice, plain]).is_nearer(0, 1)


def _listed(q: PlanningProblem, budget: Budget, strategy: str) -> Choice:
    """What is read down the list of a strategy."""
    constraints = q.constraints(budget)
    if budget.error is None or strategy == "full":
        return choose(q.candidates, constraints, strategy)
    return _for_error(q, constraints, budget.error, strategy)


def _for_error(q: PlanningProblem, constraints: Constraints, error: float, strategy: str) -> Choice:
    c = q.candidates
    everything = choose(c, constraints, strategy)
    refuse_without_base(c, int(c.nbytes[everything].sum()), 0)
    refuse_dear_pins(c, constraints)
    none = np.zeros(len(c.row), np.bool_)
    update = (predict(c, [none]) or [Prediction(0.0, None)])[0]
    allowed = error * max(0.0, update.error - (update.margin or 0.0))
    refuse_unbounded(q.bound(none), error)
    refuse_out_of_reach(q.bound(everything), error, allowed)
    items, order = rank(c, strategy, everything & ~constraints.pinned)
    # The first `low` items are too few, the first `high` enough.
    low, high, best = -1, len(order) + 1, everything
    while high - low > 1:
        middle = (low + high) // 2
        choice = spend(c, items, order[:middle], constraints)
        value = q.bound(choice).value
        if value is not None and value <= allowed:
            high, best = middle, choice
        else:
            low = middle
    return best


def refuse_unbounded(bound: Bound, error: float) -> None:
    """Raise BudgetError where no error can be promised."""
    if bound.value is None:
        raise BudgetError(
            "This merge has no error bound, so no error can be promised",
            where="budget, error",
            expected="a method whose error is bounded",
            found=f"error {error}: {bound.note}",
            next_step="give a limit in bytes or percent, or choose another method",
        )


def refuse_out_of_reach(least: Bound, error: float, allowed: float) -> None:
    """Raise BudgetError where even the `least` bound is above what is `allowed`."""
    if least.value is not None and least.value > allowed:
        raise BudgetError(
            "What the recipe lets a plan read is not enough for its error",
            where="budget, error",
            expected=f"a bound of at most {allowed:.6g} (error {error})",
            found=f"{least.value:.6g} with everything that is allowed",
            next_step="exclude less, raise the shares, or allow a larger error",
        )


def estimates(q: PlanningProblem, budget: Budget, selection: BlockSelection) -> Estimates:
    """What a selection costs and promises."""
    c, choice = q.candidates, selection.choice
    bound = q.bound(choice)
    none = np.zeros(len(c.row), np.bool_)
    predictions = selection.predictions or predict(c, [choice, none], replay=True)
    units = np.bincount(c.unit, choice, c.n_units) > 0
    starts = choice & ~np.concatenate([[False], choice[:-1] & (np.diff(c.row) == 0)])
    return Estimates(
        budget_bytes=budget.resolve(int(c.nbytes.sum())),
        strategy=selection.strategy,
        ranking=selection.ranking,
        block_elems=c.grid.block_elems,
        expert_bytes_total=int(c.nbytes.sum()),
        expert_bytes_planned=int(c.nbytes[choice].sum()),
        blocks_total=c.n_units,
        blocks_bought=int(units.sum()),
        blocks_zero=int(c.unit_zero.sum()),
        reads=int(starts.sum()),
        error_bound=bound.value,
        bound_note=bound.note,
        predicted_error=_finite(predictions[0].error) if predictions else None,
        predicted_margin=predictions[0].margin if predictions else None,
        update_norm=_finite(predictions[1].error) if predictions else None,
    )


def _finite(norm: float) -> float | None:
    return norm if math.isfinite(norm) else None
