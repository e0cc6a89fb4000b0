"""From a recipe's budget to the levels that are read of packs, and to what they promise.

As `selection` does for whole blocks. What is exact is bought everywhere if it fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.domain.plan import Estimates
from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.bounds import Bound, Sensitivity
from mergepipe_pipeline.planner.candidates import Candidates, Group
from mergepipe_pipeline.planner.constraints import Constraints, Names, constraints_of
from mergepipe_pipeline.planner.level_bounds import level_bound
from mergepipe_pipeline.planner.level_samples import LevelSamples
from mergepipe_pipeline.planner.levels import Levels, LevelTable
from mergepipe_pipeline.planner.packed_rows import NOTHING, ORIGINAL, PackPace
from mergepipe_pipeline.planner.predict import STATED_ERRORS
from mergepipe_pipeline.planner.selection import refuse_out_of_reach, refuse_unbounded
from mergepipe_pipeline.planner.simulation import PARTS
from mergepipe_pipeline.planner.strategies import allowed, refuse_dear, refuse_without_base
from mergepipe_pipeline.planner.upgrades import Upgrades, ranked_upgrades, taken

#: The strategy that reads packs.
PACKS = "packs"


@dataclass(frozen=True, kw_only=True)
class LevelProblem:
    """As `selection.PlanningProblem`, with packs: what can be read is in `table`.

    `samples` are by number of the output tensor; `block_elems` is the recipe's grid, on which
    statistics are. `pace` says where packs are read although everything fits.
    """

    table: LevelTable
    sensitivities: Mapping[int, Sensitivity]
    samples: Mapping[int, LevelSamples]
    tensors: Sequence[str]
    experts: Sequence[Names]
    pace: PackPace
    block_elems: int

    @property
    def candidates(self) -> Candidates:
        """What can be read, in blocks."""
        return self.table.candidates

    def bound(self, levels: Levels) -> Bound:
        """The bound of a choice."""
        return level_bound(self.table, levels, self.sensitivities)

    def predict(self, choices: Sequence[Levels]) -> list[float] | None:
        """‖W_plan − W_full‖₂ of each choice, as estimated; None without statistics."""
        squares = self.squares(choices)
        if squares is None:
            return None
        return [math.sqrt(max(square, 0.0)) for square in squares.mean(axis=1).tolist()]

    def squares(self, choices: Sequence[Levels]) -> F64Array | None:
        """[choices, PARTS]: squared errors, as each part of the samples estimates them."""
        if any(r.block_l2sq is None for r in self.candidates.rows):
            return None
        residuals = [self.table.residual_sq(levels) for levels in choices]

        def of_group(group: Group) -> F64Array:
            squares = np.zeros((len(choices), PARTS))
            for n, (levels, of_choice) in enumerate(zip(choices, residuals, strict=True)):
                residual: F64Array = group.table(of_choice)
                if residual.any():
                    squares[n] = self.samples[group.tensor].squares(group.table(levels), residual)
            return squares

        total = np.zeros((len(choices), PARTS))
        with threadpool_limits(1, "blas"), Workers(threads.PLANNING) as workers:
            for squares in workers.map(of_group, self.candidates.groups()):
                total += squares
        return total

    def constraints(self, budget: Budget) -> Constraints:
        """What a budget allows."""
        return constraints_of(budget, self.candidates, self.tensors, self.experts)


@dataclass(frozen=True)
class LevelSelection:
    """The levels selected for a problem."""

    problem: LevelProblem
    levels: Levels


def select_levels(q: LevelProblem, budget: Budget) -> Levels:
    """The levels that a budget covers.

    Raises BudgetError for pinned blocks that cost more than the budget, for a partial budget
    without a base to stand in for what is not read, and for an error that cannot be promised.
    """
    constraints = q.constraints(budget)
    if budget.error is not None:
        return _for_error(q, constraints, budget.error)
    if (levels := everything_exact(q, constraints)) is not None:
        return levels
    needed = int(q.table.nbytes(q.table.cheapest)[allowed(q.candidates, constraints)].sum())
    refuse_without_base(q.candidates, needed, constraints.budget_bytes)
    pinned = pinned_levels(q, constraints)
    return taken(q.table, upgrades_of(q, constraints), constraints, pinned)


def levels_for(q: LevelProblem, budgets: Iterable[Budget]) -> Iterator[tuple[Budget, Levels]]:
    """The levels that each of some budgets covers, which differ in their amounts alone.

    The list is made once. Budgets that do not cover what the recipe pins are left out.
    """
    upgrades = None
    for budget in budgets:
        constraints = q.constraints(budget)
        if (levels := everything_exact(q, constraints)) is None:
            try:
                pinned = pinned_levels(q, constraints)
            except BudgetError:
                continue
            upgrades = upgrades or upgrades_of(q, constraints)
            levels = taken(q.table, upgrades, constraints, pinned)
        yield budget, levels


def everything_exact(q: LevelProblem, constraints: Constraints) -> Levels | None:
    """Exact levels of all that is allowed, from packs where that is faster; None if too dear."""
    useful = allowed(q.candidates, constraints)
    cheapest = np.where(useful, q.table.cheapest, np.int8(NOTHING))
    if not _is_affordable(q, constraints, cheapest):
        return None
    faster = np.where(useful, q.table.exact(q.pace), np.int8(NOTHING))
    return faster if _is_affordable(q, constraints, faster) else cheapest


def _is_affordable(q: LevelProblem, constraints: Constraints, levels: Levels) -> bool:
    """Whether a choice is within the budget and every expert's share."""
    spent = np.bincount(q.candidates.expert, q.table.nbytes(levels), len(constraints.caps))
    return bool(spent.sum() <= constraints.budget_bytes and (spent <= constraints.caps).all())


def pinned_levels(q: LevelProblem, constraints: Constraints) -> Levels:
    """What is read before anything else: exact levels of what the recipe pins.

    Raises BudgetError if these cost more than there is.
    """
    levels = np.where(constraints.pinned, q.table.cheapest, np.int8(NOTHING))
    refuse_dear(int(q.table.nbytes(levels).sum()), constraints)
    return levels


def upgrades_of(
    q: LevelProblem, constraints: Constraints, *, with_near: bool = True, evenly: bool = True
) -> Upgrades:
    """The list that a budget goes down, `evenly`, or a promised error."""
    free = allowed(q.candidates, constraints) & ~constraints.pinned
    return ranked_upgrades(q.table, free, with_near=with_near, evenly=evenly)


def _for_error(q: LevelProblem, constraints: Constraints, error: float) -> Levels:
    """The fewest upgrades from the top of the list whose bound is within the error.

    Of votes and means only exact levels promise anything.
    """
    c = q.candidates
    useful = allowed(c, constraints)
    refuse_without_base(c, int(c.nbytes[useful].sum()), 0)
    pinned = pinned_levels(q, constraints)
    none = np.zeros(len(c.row), np.int8)
    allowed_error = error * _least_update(q, none)
    refuse_unbounded(q.bound(none), error)
    is_sum = all(s.response == "additive" for s in q.sensitivities.values())
    upgrades = upgrades_of(q, constraints, with_near=is_sum, evenly=False)
    best = np.where(useful, q.table.cheapest, np.int8(NOTHING))
    if not _is_affordable(q, constraints, best):  # for some expert's share
        best = taken(q.table, upgrades, constraints, pinned)
    refuse_out_of_reach(q.bound(best), error, allowed_error)
    # The first `low` upgrades are too few, the first `high` enough.
    low, high = -1, len(upgrades.candidate) + 1
    while high - low > 1:
        middle = (low + high) // 2
        levels = taken(q.table, upgrades.first(middle), constraints, pinned)
        value = q.bound(levels).value
        if value is not None and value <= allowed_error:
            high, best = middle, levels
        else:
            low = middle
    return best


def _least_update(q: LevelProblem, none: Levels) -> float:
    """The update's norm, less what samples may be off by."""
    squares = q.squares([none])
    assert squares is not None
    off = STATED_ERRORS * squares.std(ddof=1) / math.sqrt(PARTS)
    return math.sqrt(max(0.0, float(squares.mean() - off)))


def level_estimates(q: LevelProblem, budget: Budget, levels: Levels) -> Estimates:
    """What a choice costs and promises."""
    c = q.candidates
    bound = q.bound(levels)
    error, update = q.predict([levels, np.zeros_like(levels)]) or (math.inf, math.inf)
    if error == 0 and q.table.residual_sq(levels).any():
        error = math.inf  # samples without any residual do not show that there is none
    if update == 0 and not c.zero.all():
        update = math.inf
    chosen, nbytes = levels != NOTHING, q.table.nbytes(levels)
    # A new read: another row, or another way of reading.
    same = (np.diff(c.row, prepend=-1) == 0) & (np.diff(levels, prepend=levels[:1]) == 0)
    return Estimates(
        budget_bytes=budget.resolve(int(c.nbytes.sum())),
        strategy=PACKS,
        ranking=PACKS,
        block_elems=q.block_elems,
        expert_bytes_total=int(c.nbytes.sum()),
        expert_bytes_planned=int(nbytes.sum()),
        blocks_total=c.n_units,
        blocks_bought=int((np.bincount(c.unit, chosen, c.n_units) > 0).sum()),
        blocks_zero=int(c.unit_zero.sum()),
        reads=int((chosen & ~same).sum()),
        error_bound=bound.value,
        bound_note=bound.note,
        predicted_error=error if math.isfinite(error) else None,
        predicted_margin=0.0 if error == 0 else None,
        update_norm=update if math.isfinite(update) else None,
        expert_bytes_packed=int(nbytes[levels != ORIGINAL].sum()),
        pack_block_elems=c.grid.block_elems,
    )
