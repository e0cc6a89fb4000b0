"""What a budget can buy where experts have packs, best first, and how it goes down that list.

An upgrade takes one block of an expert from one level to a better one. Blocks are independent, so
the steepest parts of their convex hulls first is optimal for every budget that they fill exactly
(Everett 1963, Lagrange multipliers); what is read of a block is the last of its upgrades.

What is saved is counted in one of two ways. For a promised error it is ‖c·δ‖². For a budget it is
what keeps skill (docs/packs.md): models with some places sharp and others blank have a smaller
error, and less skill. In votes and means a block counts by its elements, whatever the size of its
deltas, and experts of like strength go from level to level together; in sums it counts by elements
times rms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.arrays import F64Array, I32Array, I64Array
from mergepipe_pipeline.planner.candidates import Candidates, Choice
from mergepipe_pipeline.planner.constraints import Constraints
from mergepipe_pipeline.planner.levels import Levels, LevelTable
from mergepipe_pipeline.planner.packed_rows import N_LEVELS, NOTHING, ORIGINAL

#: Experts whose squared norms in a place are within this factor of the largest count alike there.
_ALIKE = 16.0


@dataclass(frozen=True)
class Upgrades:
    """Upgrades, the most saved per byte first: `candidate` to `level` for `nbytes` more bytes.

    `worth` is what each saves per byte: squared error, or as a budget counts it.
    """

    candidate: I32Array
    level: Levels
    nbytes: I64Array
    worth: F64Array

    def first(self, count: int) -> Upgrades:
        """The best of them."""
        cut = slice(count)
        return Upgrades(self.candidate[cut], self.level[cut], self.nbytes[cut], self.worth[cut])


def ranked_upgrades(
    table: LevelTable, free: Choice, *, with_near: bool = True, evenly: bool = True
) -> Upgrades:
    """The upgrades of the candidates in `free`; without `with_near` to exact levels only.

    They are ranked by the squared error that they save if not `evenly`. A row that is read whole is
    one upgrade, of its first candidate.
    """
    from mergepipe_pipeline.planner.chains import falling
    from mergepipe_pipeline.planner.hulls import HUGE, row_upgrades

    c = table.candidates
    most = len(c.row) * (1 + N_LEVELS)
    candidate, level = np.empty(most, np.int32), np.empty(most, np.int8)
    nbytes, saved = np.empty(most, np.int64), np.empty(most)
    no_sizes, no_rests = np.empty((0, 0), np.uint32), np.empty((0, 0), np.float32)
    no_levels, at = np.empty(0, np.bool_), 0
    useful = free & ~c.zero
    whole = _evened(c) if evenly else c.sq_norm
    for row, cut in zip(c.rows, c.row_slices(), strict=True):
        if row.bundle_nbytes is not None:
            if useful[cut].any():
                candidate[at], level[at] = cut.start, ORIGINAL
                nbytes[at], saved[at] = row.bundle_nbytes, min(whole[cut].sum(), HUGE)
                at += 1
            continue
        of = row.levels
        at = row_upgrades(
            of.packed.nbytes if of else no_sizes,
            of.packed.residual_sq if of else no_rests,
            (of.usable if with_near else of.exact) if of else no_levels,
            of.exact if of else no_levels,
            c.nbytes[cut],
            table.delta_sq[cut],
            whole[cut],
            useful[cut],
            cut.start,
            at,
            candidate,
            level,
            nbytes,
            saved,
        )
    candidate, level, nbytes = candidate[:at], level[:at], nbytes[:at]
    worth = saved[:at] / np.maximum(nbytes, 1)
    if evenly and not (is_sum := _is_sum(c)[candidate]).all():
        worth = np.where(is_sum, worth, _together(c, worth, candidate, level))
    worth = falling(worth, candidate)
    order = _best_first(worth)
    return Upgrades(candidate[order], level[order], nbytes[order], worth[order])


def _best_first(worth: F64Array) -> I64Array:
    """Places in falling order of worth, as float32 tells it; of equals the first place first.

    Sorted as integers with the place in their lower half, which is five times as fast as by key.
    """
    bits = np.minimum(worth, np.finfo(np.float32).max).astype(np.float32).view(np.uint32)
    keys = (~bits).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(len(worth), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def taken(
    table: LevelTable, upgrades: Upgrades, constraints: Constraints, pinned: Levels
) -> Levels:
    """The levels read along the list as long as they fit, over those in `pinned`, which come first.

    An upgrade that does not fit, and all further ones of its block, are passed over.
    """
    from mergepipe_pipeline.planner.chains import affordable

    c, count = table.candidates, len(upgrades.candidate)
    expert = np.array([r.position for r in c.rows], np.int32)[c.row[upgrades.candidate]]
    nbytes = table.nbytes(pinned)
    spent = np.bincount(c.expert, nbytes, len(constraints.caps)).astype(np.int64)
    fits = affordable(
        upgrades.nbytes,
        upgrades.candidate,
        expert,
        upgrades.nbytes,
        np.arange(count + 1),
        constraints.budget_bytes - int(nbytes.sum()),
        constraints.caps - spent,
        len(c.row),
    )
    levels = pinned.copy()
    # Of a block's upgrades the last is the best, and stands behind the others.
    levels[upgrades.candidate[fits]] = upgrades.level[fits]
    for cut in table.bundles:
        levels[cut] = np.where(c.zero[cut], NOTHING, levels[cut.start])
    return levels


def _evened(c: Candidates) -> F64Array:
    """What a budget counts each candidate for; 0 where nothing is to be saved."""
    numel = np.array([row.numel for row in c.rows], np.int64)[c.row]
    length = np.minimum(numel - c.block * c.grid.block_elems, c.grid.block_elems)
    known = np.isfinite(c.sq_norm)
    mean_sq = max(c.sq_norm[known].sum(), 1e-300) / max(length[known].sum(), 1)
    rms = np.sqrt(c.sq_norm / length / mean_sq)  # relative to all: sums and votes may mix
    return np.where(c.sq_norm > 0, length * np.where(_is_sum(c), rms, 1.0), 0.0)


def _is_sum(c: Candidates) -> Choice:
    """Candidates whose method adds up deltas."""
    of_row: Choice = np.array([row.is_sum for row in c.rows], np.bool_)
    return of_row[c.row]


def _together(c: Candidates, worth: F64Array, candidate: I32Array, level: Levels) -> F64Array:
    """The mean `worth` of all upgrades of a place to one level, times each expert's strength."""
    step = c.out_block[candidate] * (1 + ORIGINAL) + level
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
