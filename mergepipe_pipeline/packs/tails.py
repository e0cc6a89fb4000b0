"""How the magnitudes of δ̂ are spread at each level that approximates, in a sample of a tensor.

A trim keeps other elements of δ̂ than of δ. `planner.lengths` finds from a tail what it keeps of δ̂.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mergepipe_pipeline.arrays import F32Array, F64Array, I16Array
from mergepipe_pipeline.domain.pack import STEPPED, TAIL_LENGTH, TIERS
from mergepipe_pipeline.packs.ternary import quantised, step_of


def tails_of(
    delta: F32Array, rungs: Sequence[I16Array], unit: float, rms: Sequence[float]
) -> F32Array:
    """The tails [levels that approximate, TAIL_LENGTH] of a tensor.

    `delta` [n] is a sample of δ. The tensor's factors give `rungs` [n] of it, in steps; of all
    elements each gives the root mean square `rms`. Tails are scaled to it, since a sample has rows
    that are longer, or shorter.
    """
    near = [numbers * step_of(unit) for numbers in rungs]  # [n] each
    tiers = np.array([[TIERS.index(tier)] for tier in STEPPED], np.int8)  # [stepped, 1]
    left = np.broadcast_to(delta - near[-1], (len(STEPPED), 1, len(delta)))
    units, thresholds = np.full(len(STEPPED), unit), np.zeros(len(STEPPED), np.uint32)
    # [stepped, n]
    stepped = near[-1] + quantised(np.ascontiguousarray(left), units, thresholds, tiers)[:, 0]
    tails = np.stack([_tail(read) for read in (*near, *stepped)])
    own = tails[: len(near), 0].astype(np.float64)
    scale = np.divide(rms, own, out=np.ones(len(near)), where=own > 0)  # [rungs]
    tails *= np.append(scale, np.full(len(stepped), scale[-1]))[:, None]
    return tails


def _tail(read: F32Array) -> F32Array:
    """The root mean square of δ̂, and magnitudes above which equal parts of ‖δ̂‖² lie."""
    falling = np.sort(np.abs(read))[::-1]
    above: F64Array = np.cumsum(np.square(falling, dtype=np.float64))  # [n], as `falling`
    parts = np.linspace(0, above[-1], TAIL_LENGTH - 1)
    rms = np.sqrt(above[-1] / len(read))
    return np.append(rms, np.interp(parts, above, falling)).astype(np.float32)
