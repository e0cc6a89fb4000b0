"""What a budget can buy, best first, and how it goes down that list.

An upgrade takes one block of an expert from one level to a better one; the stored elements are the
best level. Blocks are independent, so the steepest parts of their convex hulls first is optimal for
every budget that they fill exactly (Everett 1963, Lagrange multipliers); what is read of a block is
the last of its upgrades. A strategy is a score: what reading all of a block saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.arrays import F32Array, F64Array, I32Array, I64Array, U32Array
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.candidates import Candidates, Choice
from mergepipe_pipeline.planner.constraints import Constraints
from mergepipe_pipeline.planner.levels import Levels, LevelTable
from mergepipe_pipeline.planner.packed_rows import (
    N_LEVELS,
    N_RUNGS,
    NOTHING,
    ORIGINAL,
    X_LEVEL,
    RowLevels,
)
from mergepipe_pipeline.planner.upgrades import Upgrades, affordable, joined

#: The strategy that reads packs.
PACKS = "packs"
#: What is not finite counts as this much.
_HUGE = 1e100
#: Experts whose squared norms in a place are within this factor of the largest count alike there.
_ALIKE = 16.0
#: An element of a vector is worth so many of a matrix: it scales or shifts a channel, which all of
#: a matrix's rows meet. Found by the divergence of answers of fine-tunes of SmolLM2.
_WORTH_OF_VECTOR_ELEM = 32
#: How often what is left of a budget is spent.
_AGAIN = 4


@dataclass(frozen=True)
class Strategy:
    """The gain of reading: `score` [candidates], of which a level saves what it does not leave.

    With `is_even` upgrades of one place to one level in votes and means go together, for experts
    of like strength.
    """

    score: Callable[[Candidates], F64Array]
    is_even: bool = False


@dataclass(frozen=True)
class Ranked:
    """Upgrades, the most saved per byte first: a candidate to a level for so many more bytes.

    Arrays are [upgrades], but for `free` [candidates]: those that the upgrade of a row is for; and
    `fees` [rows]: the bytes of factors that its first exact level X needs besides.
    """

    candidate: I32Array
    level: Levels
    nbytes: I64Array
    free: Choice
    fees: I64Array

    @property
    def has_rungs(self) -> bool:
        """Whether any upgrade is of a row as a whole."""
        return bool((self.level <= N_RUNGS).any())

    def first(self, count: int) -> Ranked:
        """Return the best of them."""
        some = slice(count)
        upgrades = self.candidate[some], self.level[some], self.nbytes[some]
        return Ranked(*upgrades, self.free, self.fees)


def magnitude(c: Candidates) -> F64Array:
    """Score by ‖c·δ‖²: what is best for deltas that are orthogonal to each other."""
    return c.gain


def even(c: Candidates) -> F64Array:
    """Score by what keeps skill (docs/packs.md), not by the error.

    Models with some places sharp and others blank have a smaller error, and less skill. In votes
    and means a block counts by its elements, whatever the size of its deltas; in sums by elements
    times rms. An element of a vector counts 32 times.
    """
    numel = np.array([row.numel for row in c.rows], np.int64)[c.row]  # [candidates], as all below
    length = np.minimum(numel - c.block * c.grid.block_elems, c.grid.block_elems)
    worth = np.where([row.is_vector for row in c.rows], _WORTH_OF_VECTOR_ELEM, 1)[c.row]
    known = np.isfinite(c.sq_norm)
    mean_sq = max(c.sq_norm[known].sum(), 1e-300) / max(length[known].sum(), 1)
    rms = np.sqrt(c.sq_norm / length / mean_sq)  # relative to all: sums and votes may mix
    return np.where(c.sq_norm > 0, length * worth * np.where(_is_sum(c), rms, 1.0), 0.0)


STRATEGIES: dict[str, Strategy] = {
    PACKS: Strategy(even, is_even=True),
    "magnitude": Strategy(magnitude),
}
#: Of packs, for a promised error instead of a budget.
BY_ERROR = Strategy(lambda c: c.sq_norm)


def strategy_named(name: str) -> Strategy:
    """Return the strategy of this name. Raises BudgetError for an unknown one."""
    if name not in STRATEGIES:
        raise BudgetError(
            "Unknown strategy",
            where="strategy",
            expected=", ".join((*STRATEGIES, "full")),
            found=repr(name),
            next_step="use magnitude",
        )
    return STRATEGIES[name]


def rank(
    table: LevelTable,
    strategy: Strategy,
    free: Choice,
    *,
    with_near: bool = True,
) -> Ranked:
    """Rank the upgrades of the candidates in `free`; without `with_near` to exact levels only.

    A row that is read whole is one upgrade, of its first candidate.
    """
    c = table.candidates
    worth = np.minimum(np.nan_to_num(strategy.score(c), nan=_HUGE, posinf=_HUGE), _HUGE)
    useful = free & ~c.zero
    made = _stored_upgrades(c, worth, useful)
    has_levels = any(row.levels for row in c.rows)
    if has_levels:
        made = joined(made, _packed_upgrades(table, worth, useful, with_near=with_near))
    candidate, level, nbytes, saved = made
    per_byte = saved / np.maximum(nbytes, 1)
    if strategy.is_even and not (is_sum := _is_sum(c)[candidate]).all():
        per_byte = np.where(is_sum, per_byte, _together(c, per_byte, candidate, level))
    if has_levels:
        from mergepipe_pipeline.planner.hulls import falling

        per_byte = falling(per_byte, candidate, level, c.row[candidate])
    order = _best_first(per_byte)
    return Ranked(candidate[order], level[order], nbytes[order], useful, _fees(c, candidate, level))


def _stored_upgrades(c: Candidates, worth: F64Array, useful: Choice) -> Upgrades:
    """The upgrades of rows without a pack: each useful block to its stored elements."""
    is_whole = np.array([row.bundle_nbytes is not None for row in c.rows], np.bool_)[c.row]
    has_pack = np.array([bool(row.levels) for row in c.rows], np.bool_)[c.row] & ~is_whole
    of_row = np.bincount(c.row, worth, len(c.rows))[c.row]  # [candidates], as all here
    any_useful = np.bincount(c.row[useful], minlength=len(c.rows))[c.row] > 0
    saved = np.where(is_whole, of_row, worth)
    # The bytes of a row that is read whole stand at its first block.
    offered = np.where(is_whole, any_useful & (c.block == 0), useful & ~has_pack)
    candidate = np.flatnonzero(offered & (saved > 0)).astype(np.int32)
    level = np.full(len(candidate), ORIGINAL, np.int8)
    return Upgrades(candidate, level, c.nbytes[candidate], saved[candidate])


def _packed_upgrades(
    table: LevelTable, worth: F64Array, useful: Choice, *, with_near: bool
) -> Upgrades:
    """The upgrades of rows that have a pack, to its levels and to the stored elements."""
    # It loads the compiler, which plans that read no pack do without.
    from mergepipe_pipeline.planner.hulls import RowBlocks, row_upgrades

    c = table.candidates
    rows = [
        (row.levels, cut)
        for row, cut in zip(c.rows, c.row_slices(), strict=True)
        if row.levels and row.bundle_nbytes is None
    ]
    most = sum(cut.stop - cut.start for _, cut in rows) * (1 + N_LEVELS)
    made = Upgrades(
        candidate=np.empty(most, np.int32),
        level=np.empty(most, np.int8),
        nbytes=np.empty(most, np.int64),
        saved=np.empty(most),
    )
    at = 0
    for levels, cut in rows:
        offered = _offered(levels, table.cheapest[cut], with_near=with_near)
        blocks = RowBlocks(worth[cut], table.delta_sq[cut], c.nbytes[cut], useful[cut], *offered)
        at = row_upgrades(blocks, cut.start, made, at)
    return made.at(slice(at))


def _fees(c: Candidates, candidate: I32Array, level: Levels) -> I64Array:
    """[rows]: bytes of a pack's factors, where no upgrade is a rung that pays for them."""
    fees = np.array([row.levels.packed.rung_nbytes[-1] if row.levels else 0 for row in c.rows])
    fees[c.row[candidate[level <= N_RUNGS]]] = 0
    return fees.astype(np.int64)


def _offered(
    of: RowLevels, cheapest: Levels, *, with_near: bool
) -> tuple[I64Array, U32Array, F32Array, Choice, Choice]:
    """What a row's pack offers, as the last fields of `RowBlocks`.

    Where no rung pays for the factors that X needs, X is offered only if the row as a whole is
    read so at the least cost.
    """
    usable = (of.usable if with_near else of.exact).copy()
    usable[X_LEVEL - 1] &= bool(usable[0] or (cheapest == X_LEVEL).any())
    return of.packed.rung_nbytes, of.packed.nbytes, of.packed.residual_sq, usable, of.exact


def spend(table: LevelTable, ranked: Ranked, constraints: Constraints, pinned: Levels) -> Levels:
    """Return the levels read along the list as long as they fit, over those in `pinned`.

    An upgrade that does not fit, and all further ones of its block, are passed over.
    """
    budget_bytes = constraints.budget_bytes
    levels = _spent(table, ranked, constraints, pinned, budget_bytes)
    # Rows that end up as stored or at X20 need no factors: what these cost can be spent again.
    for _ in range(_AGAIN):
        left = constraints.budget_bytes - int(table.nbytes(levels).sum())
        if not left or not ranked.has_rungs:
            break
        more = _spent(table, ranked, constraints, pinned, budget_bytes + left)
        if table.nbytes(more).sum() > constraints.budget_bytes or np.array_equal(more, levels):
            break
        levels, budget_bytes = more, budget_bytes + left
    return levels


def _spent(
    table: LevelTable, ranked: Ranked, constraints: Constraints, pinned: Levels, budget_bytes: int
) -> Levels:
    """Do as `spend` for upgrades that cost no more than `budget_bytes` in all."""
    c = table.candidates
    nbytes = table.nbytes(pinned)
    spent = np.bincount(c.expert, nbytes, len(constraints.caps)).astype(np.int64)
    row = c.row[ranked.candidate]
    expert = c.expert[ranked.candidate]
    limits = budget_bytes - int(nbytes.sum()), constraints.caps - spent
    if (ranked.level == ORIGINAL).all():
        fits = affordable(ranked.nbytes, expert, *limits)
    else:
        from mergepipe_pipeline.planner.hulls import affordable_levels

        upgrades = ranked.candidate, ranked.level, ranked.nbytes
        fits = affordable_levels(*upgrades, row, expert, ranked.fees, len(c.row), *limits)
    levels = pinned.copy()
    # Of a block's upgrades the last is the best, and stands behind the others.
    levels[ranked.candidate[fits]] = ranked.level[fits]
    rungs = np.zeros(len(c.rows), np.int8)  # [rows]
    is_rung = fits & (ranked.level <= N_RUNGS)
    np.maximum.at(rungs, row[is_rung], ranked.level[is_rung])
    levels = np.where(ranked.free & (levels == NOTHING), rungs[c.row], levels)
    for cut in table.bundles:
        levels[cut] = np.where(c.zero[cut], NOTHING, levels[cut.start])
    return levels


def _best_first(worth: F64Array) -> I64Array:
    """Places in falling order of worth, as float32 tells it; of equals the first place first.

    Sorted as integers with the place in their lower half, which is five times as fast as by key.
    """
    bits = np.minimum(worth, np.finfo(np.float32).max).astype(np.float32).view(np.uint32)
    keys = (~bits).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(len(worth), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _is_sum(c: Candidates) -> Choice:
    """Candidates whose method adds up deltas."""
    of_row: Choice = np.array([row.is_sum for row in c.rows], np.bool_)
    return of_row[c.row]


def _together(c: Candidates, worth: F64Array, candidate: I32Array, level: Levels) -> F64Array:
    """The mean `worth` of all upgrades of a place to one level, times each expert's strength."""
    step = c.out_block[candidate] * (1 + ORIGINAL) + level  # [upgrades]
    count = np.maximum(np.bincount(step), 1)
    mean = np.bincount(step, worth) / count
    together: F64Array = mean[step] * _strength(c)[candidate]
    return together


def _strength(c: Candidates) -> F64Array:
    """1 for the expert with the largest ‖c·δ‖² in a place and those not far below it, else less."""
    largest = np.zeros(c.n_out_blocks)
    with np.errstate(divide="ignore", invalid="ignore"):
        np.maximum.at(largest, c.out_block, c.sq_norm)
        steps = np.ceil(np.log(c.sq_norm / largest[c.out_block]) / np.log(_ALIKE))
    return np.where(np.isnan(steps), 1.0, _ALIKE**steps)  # of what is unknown nothing is less
