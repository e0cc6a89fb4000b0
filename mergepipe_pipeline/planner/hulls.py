"""The upgrades of a block worth buying, and which of them a budget covers; compiled.

What is worth buying is the lower convex hull of what a block's levels leave over their bytes. A
large merge has millions of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import BoolArray, F32Array, F64Array, I32Array, I64Array, U32Array
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.planner.packed_rows import LAST_NEAR, N_RUNGS, ORIGINAL, X_LEVEL
from mergepipe_pipeline.planner.upgrades import Upgrades

#: Savings per byte that differ by less are equal.
_ROUNDING = 1e-9


class RowBlocks(NamedTuple):
    """The blocks of one row: what can be read of each, and what that leaves.

    `worth` [blocks], finite, is what nothing read leaves; a level leaves the share residual_sq /
    `delta_sq` of it. `nbytes` and `residual_sq` [levels, blocks] are a pack's, of which [levels]
    are `usable` and `exact`; without a pack there are no levels. `rung_nbytes` [rungs] are read for
    the first levels, once for the row, and then cost no block anything. The stored elements cost
    `stored_nbytes` [blocks]. Only blocks that are `free` [blocks] can be bought.
    """

    worth: F64Array
    delta_sq: F64Array
    stored_nbytes: I64Array
    free: BoolArray
    rung_nbytes: I64Array
    nbytes: U32Array
    residual_sq: F32Array
    usable: BoolArray
    exact: BoolArray


@cached_njit(nogil=True)
def _left(row: RowBlocks, k: int, b: int) -> float:
    """The residual of level `k` of a pack at block `b`; infinite where it cannot be used."""
    residual_sq, delta_sq = row.residual_sq[k, b], row.delta_sq[b]
    if not row.usable[k] or not np.isfinite(residual_sq):
        return np.inf
    if row.exact[k]:
        return 0.0
    if np.isfinite(delta_sq) and delta_sq > 0:
        return float(row.worth[b] * min(residual_sq / delta_sq, 1.0))
    return np.inf


@cached_njit(nogil=True)
def row_upgrades(row: RowBlocks, first: int, out: Upgrades, at: int) -> int:
    """Write a row's upgrades to `out` from place `at` on; return the place after them.

    The row's candidates are numbered from `first` on.
    """
    count = len(row.nbytes)
    size, left = np.empty(count + 1, np.int64), np.empty(count + 1)  # [levels and stored]
    at, rung = _rung_upgrades(row, first, out, at)
    lacks_rungs = rung < 0 and count > 0 and row.rung_nbytes[-1] > 0
    for b in range(len(row.worth)):
        if not row.free[b]:
            continue
        for k in range(count):
            is_open = k >= (LAST_NEAR if lacks_rungs else N_RUNGS)
            size[k], left[k] = row.nbytes[k, b], _left(row, k, b) if is_open else np.inf
        size[count], left[count] = row.stored_nbytes[b], 0.0
        have, spent = row.worth[b] if rung < 0 else _left(row, rung, b), 0
        while have > 0:
            best, most = -1, 0.0
            for k in range(count + 1):
                if left[k] < have:
                    slope = (have - left[k]) / max(size[k] - spent, 1e-3)
                    if slope > most * (1 + _ROUNDING):
                        best, most = k, slope
            if best < 0:
                break
            out.candidate[at] = first + b
            out.level[at] = ORIGINAL if best == count else 1 + best
            out.nbytes[at], out.saved[at] = size[best] - spent, have - left[best]
            have, spent = left[best], size[best]
            at += 1
    return at


@cached_njit(nogil=True)
def _rung_upgrades(row: RowBlocks, first: int, out: Upgrades, at: int) -> tuple[int, int]:
    """Do as `row_upgrades` for rungs, which are of all free blocks; and the last of them, or −1.

    All further levels need every rung.
    """
    rung = -1
    if len(row.nbytes) == 0 or row.rung_nbytes[-1] == 0 or not row.free.any():
        return at, rung
    left = np.zeros(N_RUNGS)  # [rungs]
    have, spent = 0.0, 0
    for b in range(len(row.worth)):
        if row.free[b]:
            have += row.worth[b]
            for k in range(N_RUNGS):
                left[k] += _left(row, k, b)
    if not np.isfinite(left).all():
        return at, rung
    carrier = first + row.free.argmax()
    while rung < N_RUNGS - 1:
        best, most = N_RUNGS - 1, 0.0
        for k in range(rung + 1, N_RUNGS):
            slope = (have - left[k]) / max(row.rung_nbytes[k] - spent, 1e-3)
            if slope > most * (1 + _ROUNDING):
                best, most = k, slope
        out.candidate[at], out.level[at] = carrier, 1 + best
        out.nbytes[at], out.saved[at] = row.rung_nbytes[best] - spent, max(have - left[best], 0.0)
        have, spent, rung = left[best], row.rung_nbytes[best], best
        at += 1
    return at, rung


@cached_njit(nogil=True)
def at_levels(
    levels: npt.NDArray[np.int8],
    table: U32Array | F32Array,
    skip: BoolArray,
    out: F64Array | I64Array,
) -> None:
    """Set `out` [blocks] to a pack's `table` [levels, blocks] at each block's level.

    Only where the level is a pack's, and none to `skip` [levels].
    """
    for b in range(len(levels)):
        number = levels[b]
        if 0 < number < ORIGINAL and not skip[number - 1]:
            out[b] = table[number - 1, b]


@cached_njit(nogil=True)
def falling(
    worth: F64Array, candidate: I32Array, level: npt.NDArray[np.int8], row: I64Array
) -> F64Array:
    """`worth` made to fall from one upgrade of a candidate to the next, and from a row's rungs on.

    `row` [upgrades] is the candidate's. Rungs stand in front of their row's other upgrades.
    """
    out, most = worth.copy(), np.inf
    for p in range(len(out)):
        if p == 0 or row[p] != row[p - 1]:
            most = np.inf
        if p > 0 and candidate[p] == candidate[p - 1]:
            out[p] = min(out[p], out[p - 1])
        out[p] = min(out[p], most)
        if level[p] <= N_RUNGS:
            most = out[p]
    return out


@cached_njit(nogil=True)
def affordable_levels(
    candidate: I32Array,
    level: npt.NDArray[np.int8],
    nbytes: I64Array,
    row: I64Array,
    expert: I64Array,
    fees: I64Array,
    n_candidates: int,
    budget_bytes: int,
    caps: I64Array,
) -> BoolArray:
    """Which upgrades [upgrades] fit, going down a list that is sorted by worth.

    One that fits neither the budget nor its expert's cap (`caps` [experts]) is passed over, and
    with it all further ones of its candidate; with a rung, all of its row. `row` and `expert`
    [upgrades] are the candidate's. The first upgrade to X of a row costs its fee, too.
    """
    fits = np.zeros(len(nbytes), np.bool_)
    closed, closed_row = np.zeros(n_candidates, np.bool_), np.zeros(len(fees), np.bool_)
    remaining, room, due = budget_bytes, caps.copy(), fees.copy()
    for p in range(len(nbytes)):
        if closed[candidate[p]] or closed_row[row[p]]:
            continue
        cost = nbytes[p] + (due[row[p]] if level[p] == X_LEVEL else 0)
        fits[p] = cost <= min(remaining, room[expert[p]])
        if fits[p]:
            remaining -= cost
            room[expert[p]] -= cost
            due[row[p]] -= cost - nbytes[p]
        elif level[p] <= N_RUNGS:
            closed_row[row[p]] = True
        else:
            closed[candidate[p]] = True
    return fits
