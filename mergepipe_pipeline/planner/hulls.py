"""The upgrades of a block worth buying: the lower convex hull of what its levels leave over bytes.

Compiled: a large merge has millions of blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import BoolArray, F32Array, F64Array, I32Array, I64Array, U32Array
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.planner.packed_rows import ORIGINAL

Sizes = U32Array


#: What is not finite counts as this much.
HUGE = 1e100
#: Savings per byte that differ by less are equal.
_ROUNDING = 1e-9


@cached_njit(nogil=True)
def _residual(whole: float, residual_sq: float, delta_sq: float, exact: bool) -> float:
    """What a level leaves of `whole`; infinite where its residual is not known."""
    if not np.isfinite(residual_sq):
        return np.inf
    if exact:
        return 0.0
    if np.isfinite(delta_sq) and delta_sq > 0:
        return whole * min(residual_sq / delta_sq, 1.0)
    return np.inf


@cached_njit(nogil=True)
def row_upgrades(
    nbytes: Sizes,
    residual_sq: F32Array,
    usable: BoolArray,
    exact: BoolArray,
    stored_nbytes: I64Array,
    delta_sq: F64Array,
    worth: F64Array,
    free: BoolArray,
    first: int,
    at: int,
    candidate: I32Array,
    level: npt.NDArray[np.int8],
    cost: I64Array,
    saved: F64Array,
) -> int:
    """Write a row's upgrades behind place `at` of the last four arrays; gives the place after them.

    `nbytes` and `residual_sq` [levels, blocks] are the pack's, with the levels that are `usable`
    and `exact`; of no pack, there are no levels. `worth` [blocks] is what nothing read leaves, of
    which a level leaves the share residual_sq / `delta_sq`. Upgrades of a block stand in order;
    each is for the candidate `first` + block, to a level as numbered in `levels`, for `cost` more
    bytes, and saves `saved`. The stored elements, `stored_nbytes`, are the last level.
    """
    count = len(nbytes)
    size, residual = np.empty(count + 1, np.int64), np.empty(count + 1)
    for b in range(len(stored_nbytes)):
        if not free[b]:
            continue
        whole = min(worth[b], HUGE) if worth[b] == worth[b] else HUGE
        for k in range(count):
            rest = _residual(whole, residual_sq[k, b], delta_sq[b], exact[k])
            size[k], residual[k] = nbytes[k, b], rest if usable[k] else np.inf
        size[count], residual[count] = stored_nbytes[b], 0.0
        have, spent = whole, 0
        while have > 0:
            best, most = -1, 0.0
            for k in range(count + 1):
                if residual[k] < have:
                    slope = (have - residual[k]) / max(size[k] - spent, 1e-3)
                    if slope > most * (1 + _ROUNDING):
                        best, most = k, slope
            if best < 0:
                break
            candidate[at] = first + b
            level[at] = ORIGINAL if best == count else 1 + best
            cost[at], saved[at] = size[best] - spent, have - residual[best]
            have, spent = residual[best], size[best]
            at += 1
    return at


@cached_njit(nogil=True)
def at_levels(
    levels: npt.NDArray[np.int8], table: Sizes | F32Array, skip: BoolArray, out: F64Array | I64Array
) -> None:
    """Set `out` [blocks] to a pack's `table` [levels, blocks] at each block's level.

    Only where the level is a pack's, and none to `skip` [levels].
    """
    for b in range(len(levels)):
        number = levels[b]
        if 0 < number < ORIGINAL and not skip[number - 1]:
            out[b] = table[number - 1, b]
