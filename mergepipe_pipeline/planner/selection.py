"""From a recipe's budget to the levels that are read of each block, and to what they promise.

An amount of bytes is spent at once; what is exact is read everywhere if it fits. An error to reach
is searched for: the fewest upgrades from the top of the list whose bound is within it. Where a
vote's bound rises before it falls, they are a number of upgrades that are enough, of which one less
is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.arrays import F64Array, I64Array
from mergepipe_pipeline.domain.plan import Estimates
from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.bounds import Bound, Sensitivity, error_bound
from mergepipe_pipeline.planner.candidates import Candidates, Choice, Group
from mergepipe_pipeline.planner.constraints import Constraints, Names, constraints_of, lacks_base
from mergepipe_pipeline.planner.levels import Levels, LevelTable
from mergepipe_pipeline.planner.packed_rows import NOTHING, ORIGINAL
from mergepipe_pipeline.planner.samples import PARTS, STATED_ERRORS, Samples
from mergepipe_pipeline.planner.strategies import (
    BY_ERROR,
    PACKS,
    Ranked,
    rank,
    spend,
    strategy_named,
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """An estimate of ‖W_plan − W_full‖₂, give or take `margin` (four standard errors).

    Infinite where something that is not finite is left out. `margin` is None where a part is no
    plain sum of deltas: how far samples lead astray is not stated there.
    """

    error: float
    margin: float | None


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """The choices of a plan, and how the merge responds to what is not read.

    `sensitivities` and `samples` are by number of the output tensor, `tensors` and `experts` names
    by number; `block_elems` is the recipe's grid, on which statistics are. `has_packs`: levels of
    experts' packs can be read, too.
    """

    table: LevelTable
    sensitivities: Mapping[int, Sensitivity]
    samples: Mapping[int, Samples]
    tensors: Sequence[str]
    experts: Sequence[Names]
    block_elems: int
    has_packs: bool = False

    @property
    def candidates(self) -> Candidates:
        """The blocks that can be read."""
        return self.table.candidates

    @property
    def usual_strategy(self) -> str:
        """The strategy of a recipe that names none."""
        return PACKS if self.has_packs else "magnitude"

    def read_nbytes(self, levels: Levels) -> int:
        """Return the bytes of experts that a choice reads."""
        nbytes = int(self.table.nbytes(levels).sum())
        return nbytes - self.candidates.shared_nbytes(levels == ORIGINAL)

    def bound(self, levels: Levels) -> Bound:
        """Return the bound of a choice."""
        return error_bound(self.table, levels, self.sensitivities)

    def constraints(self, budget: Budget) -> Constraints:
        """Return what a budget allows."""
        return constraints_of(budget, self.candidates, self.tensors, self.experts)

    def predict(self, choices: Sequence[Levels]) -> list[Prediction] | None:
        """Estimate the error of each choice; None without statistics."""
        squares = self.squares(choices)
        if squares is None:
            return None
        means, off = squares.mean(axis=1), _stated(squares)
        predictions = []
        for levels, square, margin in zip(choices, means.tolist(), off.tolist(), strict=True):
            error = math.sqrt(max(square, 0.0))
            is_missing = self.table.residual_sq(levels) > 0
            if error == 0 and is_missing.any():
                error = math.inf  # samples without any residual do not show that there is none
            is_stated = math.isfinite(error) and self._is_plain_sum[is_missing].all()
            low = math.sqrt(max(square - margin, 0.0)) if is_stated else 0.0
            high = math.sqrt(max(square, 0.0) + margin) if is_stated else 0.0
            own = max(high - error, error - low) if is_stated else None
            predictions.append(Prediction(error, own))
        return predictions

    @property
    def _is_plain_sum(self) -> Choice:
        """[candidates]: whether the merge adds c·δ, with nothing dropped."""
        c = self.candidates
        of_row: Choice = np.array([r.is_sum and r.keep == 1 for r in c.rows], np.bool_)
        return of_row[c.row]

    def squares(self, choices: Sequence[Levels]) -> F64Array | None:
        """Squared errors [choices, PARTS], as each part of the samples estimates them."""
        if any(r.block_l2sq is None for r in self.candidates.rows):
            return None
        residuals = [self.table.residual_sq(levels) for levels in choices]

        def of_group(group: Group) -> F64Array:
            squares = np.zeros((len(choices), PARTS))
            tables = [group.table(residual) for residual in residuals]  # [out_blocks, E] each
            missing = [n for n, residual in enumerate(tables) if residual.any()]
            if missing:
                levels = [group.table(choices[n]) for n in missing]
                own = [tables[n] for n in missing]
                squares[missing] = self.samples[group.tensor].squares(levels, own)
            return squares

        total = np.zeros((len(choices), PARTS))
        # Threads of our own would wait for the interpreter's lock: two took twice as long as none.
        for group in self.candidates.groups():
            total += of_group(group)
        return total


def _stated(squares: F64Array) -> F64Array:
    """How far the mean over the last axis, of PARTS estimates, may be off."""
    with np.errstate(invalid="ignore"):  # of infinities
        off: F64Array = STATED_ERRORS * squares.std(axis=-1, ddof=1) / math.sqrt(PARTS)
    return off


@dataclass(frozen=True)
class Selection:
    """The levels [candidates] selected for a problem by `strategy`."""

    problem: PlanningProblem
    strategy: str
    levels: Levels


def select(q: PlanningProblem, budget: Budget, strategy: str | None = None) -> Selection:
    """Select what a budget covers; `strategy` None is the usual one.

    Raises BudgetError for an unknown strategy, for `full` under a budget that is too small, for
    pinned blocks that cost more than the budget, for a partial budget without a base to stand in
    for what is not read, and for an error that cannot be promised.
    """
    name = strategy or q.usual_strategy
    constraints = q.constraints(budget)
    if budget.error is not None and name != "full":
        return Selection(q, name, _for_error(q, constraints, budget.error, name))
    levels = _everything(q, constraints)
    if levels is None:
        if name == "full":
            raise _no_full_merge(q, constraints)
        needed = int(q.table.nbytes(_cheapest(q, constraints)).sum())
        _refuse_without_base(q.candidates, needed, constraints.budget_bytes)
        pinned = _pinned(q, constraints)
        levels = spend(q.table, _ranked(q, constraints, name), constraints, pinned)
    return Selection(q, name, levels)


def levels_for(
    q: PlanningProblem, strategy: str, budgets: Iterable[Budget]
) -> Iterator[tuple[Budget, Levels]]:
    """Yield the levels that each of some budgets covers, which differ in their amounts alone.

    The list is made once. Budgets that do not cover what the recipe pins are left out. Raises
    BudgetError where there is no base to differ from.
    """
    _refuse_without_base(q.candidates, int(q.candidates.nbytes.sum()), 0)
    ranked = None
    for budget in budgets:
        constraints = q.constraints(budget)
        try:
            pinned = _pinned(q, constraints)
        except BudgetError:
            continue
        levels = _everything(q, constraints)
        if levels is None:
            ranked = ranked or _ranked(q, constraints, strategy)
            levels = spend(q.table, ranked, constraints, pinned)
        yield budget, levels


def _allowed(c: Candidates, constraints: Constraints) -> Choice:
    """Return what is worth reading if there is no limit in bytes."""
    return ~c.zero & ~(constraints.excluded & ~constraints.pinned)


def _cheapest(q: PlanningProblem, constraints: Constraints) -> Levels:
    """The exact levels of the fewest bytes of all that is allowed."""
    useful = _allowed(q.candidates, constraints)
    return np.where(useful, q.table.cheapest, np.int8(NOTHING))


def _everything(q: PlanningProblem, constraints: Constraints) -> Levels | None:
    """Exact levels of all that is allowed; None if too dear."""
    cheapest = _cheapest(q, constraints)
    return cheapest if _is_affordable(q, constraints, cheapest) else None


def _spent(q: PlanningProblem, constraints: Constraints, levels: Levels) -> I64Array:
    """[experts]: bytes that a choice reads of each."""
    nbytes = q.table.nbytes(levels)
    return np.bincount(q.candidates.expert, nbytes, len(constraints.caps)).astype(np.int64)


def _is_affordable(q: PlanningProblem, constraints: Constraints, levels: Levels) -> bool:
    """Whether a choice is within the budget and every expert's share."""
    spent = _spent(q, constraints, levels)
    return bool(spent.sum() <= constraints.budget_bytes and (spent <= constraints.caps).all())


def _pinned(q: PlanningProblem, constraints: Constraints) -> Levels:
    """Return what is read before anything else: exact levels of what the recipe pins.

    Raises BudgetError if these cost more than there is.
    """
    levels = np.where(constraints.pinned, q.table.cheapest, np.int8(NOTHING))
    needed = int(q.table.nbytes(levels).sum())
    if needed > constraints.budget_bytes:
        raise BudgetError(
            "The budget does not cover what the recipe pins",
            where="budget, pin",
            expected=f"at least {needed} bytes",
            found=f"{constraints.budget_bytes} bytes",
            next_step="raise the budget, or pin less",
        )
    return levels


def _ranked(q: PlanningProblem, constraints: Constraints, strategy: str) -> Ranked:
    """The list that a budget goes down."""
    free = _allowed(q.candidates, constraints) & ~constraints.pinned
    return rank(q.table, strategy_named(strategy), free)


def _for_error(q: PlanningProblem, constraints: Constraints, error: float, name: str) -> Levels:
    """The fewest upgrades from the top of the list whose bound is within the error.

    Of votes and means only exact levels promise anything.
    """
    c, strategy = q.candidates, BY_ERROR if name == PACKS else strategy_named(name)
    best = _cheapest(q, constraints)
    _refuse_without_base(c, int(q.table.nbytes(best).sum()), 0)
    pinned = _pinned(q, constraints)
    none = np.zeros(len(c.row), np.int8)
    within = error * _least_update(q, none)
    _refuse_unbounded(q.bound(none), error)
    is_sum = all(s.response == "additive" for s in q.sensitivities.values())
    free = _allowed(c, constraints) & ~constraints.pinned
    ranked = rank(q.table, strategy, free, with_near=is_sum)
    if not _is_affordable(q, constraints, best):  # for some expert's share
        best = spend(q.table, ranked, constraints, pinned)
    _refuse_out_of_reach(q.bound(best), error, within)
    # The first `low` upgrades are too few, the first `high` enough.
    low, high = -1, len(ranked.candidate) + 1
    while high - low > 1:
        middle = (low + high) // 2
        levels = spend(q.table, ranked.first(middle), constraints, pinned)
        value = q.bound(levels).value
        if value is not None and value <= within:
            high, best = middle, levels
        else:
            low = middle
    return best


def _least_update(q: PlanningProblem, none: Levels) -> float:
    """The update's norm, less what samples may be off by."""
    squares = q.squares([none])
    assert squares is not None
    return math.sqrt(max(0.0, float((squares.mean(axis=1) - _stated(squares))[0])))


def _no_full_merge(q: PlanningProblem, constraints: Constraints) -> BudgetError:
    """The error for a budget, or else an expert's share, that is less than all there is."""
    own = _spent(q, constraints, _cheapest(q, constraints))
    needed, limit, what, where = int(own.sum()), constraints.budget_bytes, "budget", "budget"
    if needed <= limit:
        number = int(np.argmax(own > constraints.caps))
        needed, limit = int(own[number]), int(constraints.caps[number])
        what, where = "share of an expert", f"budget, shares, of expert {number + 1}"
    return BudgetError(
        f"The {what} does not cover a full merge",
        where=where,
        expected=f"at least {needed} bytes",
        found=f"{limit} bytes",
        next_step=f"raise the {what}, or use strategy magnitude",
    )


def _refuse_without_base(c: Candidates, needed: int, budget_bytes: int) -> None:
    """Raise BudgetError where there is a candidate that nothing could stand in for."""
    if any(r.block_l2sq is None for r in c.rows):
        raise lacks_base(needed, budget_bytes)


def _refuse_unbounded(bound: Bound, error: float) -> None:
    """Raise BudgetError where no error can be promised."""
    if bound.value is None:
        raise BudgetError(
            "This merge has no error bound, so no error can be promised",
            where="budget, error",
            expected="a method whose error is bounded",
            found=f"error {error}: {bound.note}",
            next_step="give a limit in bytes or percent, or choose another method",
        )


def _refuse_out_of_reach(least: Bound, error: float, within: float) -> None:
    """Raise BudgetError where even the `least` bound is above what is promised."""
    if least.value is not None and least.value > within:
        raise BudgetError(
            "What the recipe lets a plan read is not enough for its error",
            where="budget, error",
            expected=f"a bound of at most {within:.6g} (error {error})",
            found=f"{least.value:.6g} with everything that is allowed",
            next_step="exclude less, raise the shares, or allow a larger error",
        )


def estimates(s: Selection, budget: Budget) -> Estimates:
    """Return what a selection costs and promises."""
    q, levels = s.problem, s.levels
    c, bound = q.candidates, q.bound(levels)
    error, update = q.predict([levels, np.zeros_like(levels)]) or (None, None)
    chosen, nbytes = levels != NOTHING, q.table.nbytes(levels)
    # A new read: another row, or another way of reading.
    same = (np.diff(c.row, prepend=-1) == 0) & (np.diff(levels, prepend=levels[:1]) == 0)
    return Estimates(
        budget_bytes=budget.resolve(c.total_nbytes),
        strategy=s.strategy,
        block_elems=q.block_elems,
        expert_bytes_total=c.total_nbytes,
        expert_bytes_planned=q.read_nbytes(levels),
        blocks_total=c.n_units,
        blocks_bought=int((np.bincount(c.unit, chosen, c.n_units) > 0).sum()),
        blocks_zero=int(c.unit_zero.sum()),
        reads=int((chosen & ~same).sum()),
        error_bound=bound.value,
        bound_note=bound.note,
        predicted_error=_finite(error),
        predicted_margin=error.margin if error else None,
        update_norm=_finite(update),
        expert_bytes_packed=int(nbytes[(levels != ORIGINAL) & chosen].sum()),
        pack_block_elems=c.grid.block_elems if q.has_packs else 0,
    )


def _finite(prediction: Prediction | None) -> float | None:
    """The predicted norm, None where there is none."""
    return prediction.error if prediction and math.isfinite(prediction.error) else None
