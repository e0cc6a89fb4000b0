"""Quantises any deltas as a pack does, without encoding them: plans try it on samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F32Array, F64Array, U32Array
from mergepipe_pipeline.domain.pack import NOT_READ, TIERS
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.packs.ternary import N_TIERS, nearest, steps

_X20 = TIERS.index("X20")
_SIZE = np.uint32(0x7FFFFFFF)


def quantised(
    delta: F32Array,
    units: F64Array,
    thresholds_bits: U32Array,
    tiers: npt.NDArray[np.int8],
) -> F32Array:
    """δ̂ of `delta` [experts, rows, n] as decoders give it.

    `units` and `thresholds_bits` [experts] are those of packed tensors. Each row is read at the
    level of one of TIERS, `tiers` [experts, rows], or NOT_READ. Lossy levels make zeros of what is
    not finite.
    """
    out = np.empty_like(delta)
    per_unit, step = (1 / units).astype(np.float32), np.array([steps(u) for u in units.tolist()])
    _quantise(delta, per_unit, step, np.maximum(thresholds_bits, 1), tiers, out)
    return out


@cached_njit(nogil=True)
def _quantise(
    delta: F32Array,
    per_unit: F32Array,
    step: F32Array,
    least: U32Array,
    tiers: npt.NDArray[np.int8],
    out: F32Array,
) -> None:
    """As `quantised`, into `out`; `per_unit` [experts], `step` [experts, lossy tiers]."""
    n = delta.shape[2]
    # [n] each: a row in units, and as integers.
    scratch = np.empty(n, np.float32), np.empty(n, np.int32)
    for e in range(delta.shape[0]):
        for r in range(delta.shape[1]):
            tier, row = tiers[e, r], out[e, r]
            if tier == NOT_READ:
                row[:] = 0
            elif tier < N_TIERS:
                nearest(delta[e, r], per_unit[e], step[e, tier], tier, scratch, row)
            else:
                row[:] = delta[e, r]
                if tier == _X20:
                    bits = row.view(np.uint32)
                    for i in range(n):
                        if bits[i] & _SIZE < least[e]:
                            row[i] = 0
