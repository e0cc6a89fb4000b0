"""Deltas at a level: chunks decoded one at a time, and any delta quantised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.domain.pack import STEPPED, TIERS, Level
from mergepipe_pipeline.operators.kernels.bits import times
from mergepipe_pipeline.packs.codec import decode_numbers
from mergepipe_pipeline.packs.frames import Frames
from mergepipe_pipeline.packs.ternary import quantised, step_of


def decode_approximate(frames: Sequence[memoryview | None], unit: float, out: F32Array) -> None:
    """Fill `out` [n] with δ̂ of a chunk of a tensor with this unit; `frames` of L0, L1 … ."""
    numbers = np.empty(len(out), np.int16)
    given = Frames.of({tier: [frame] for tier, frame in zip(STEPPED, frames, strict=False)})
    decode_numbers(given, [len(frames)], numbers)
    times(numbers, step_of(unit), out)


def quantised_at(level: Level, delta: F32Array, unit: float, threshold_bits: int) -> F32Array:
    """δ̂ of `delta` [n] at one level."""
    tiers = np.array([[TIERS.index(level)]], np.int8)
    least = np.array([threshold_bits], np.uint32)
    found: F32Array = quantised(delta[None, None], np.array([unit]), least, tiers)[0, 0]
    return found
