"""How long a row reads δ̂ that is trimmed before a vote.

A trim keeps elements of δ̂ above a threshold that was found for δ. Directions spread δ̂ more evenly
than δ, so that too little of it is kept, or too much. The model's answers show that; the error of
the merge does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.arrays import F32Array, F64Array

#: ‖δ̂‖ of what is kept is to be such a share of ‖δ‖ of what is kept: the first where δ̂ explains
#: nothing of δ, the sum of both where it explains all. Fitted by the divergence of answers to
#: fine-tunes of SmolLM2 of 60 and 600 steps, at R0, R1, R2, L1 and L2 (docs/benchmarks.md).
_LEAST_KEPT, _MORE_KEPT = 0.68, 0.3
#: The lengths that are tried. Where directions explain little, longer ones would be mostly noise.
_LENGTHS = np.geomspace(0.5, 1.15, 51)
#: Lengths are whole numbers of so many parts of one, so that machines which add up in another order
#: hardly ever plan another length.
_PER_LENGTH = 128


@dataclass(frozen=True)
class Trimmed:
    """What a trim keeps of a row's δ: magnitudes from `least` up, Σδ² of `kept_sq`.

    `delta_sq` [blocks] is ‖δ‖² of all, which are of `numel` elements.
    """

    least: float
    kept_sq: float
    delta_sq: F64Array
    numel: int


def lengths_of(tails: F32Array, residual_sq: F32Array, trimmed: Trimmed) -> F32Array:
    """How many times as long δ̂ is read at each level that has a tail, [tails].

    `tails` [tails, TAIL_LENGTH] are those of a packed tensor, `residual_sq` [levels, blocks] what
    its levels leave, infinite where one cannot be used.
    """
    lengths = np.ones(len(tails), np.float32)
    for level, (rms, *magnitudes) in enumerate(tails.tolist()):
        left, delta_sq = residual_sq[level], trimmed.delta_sq
        is_usable = np.isfinite(left)
        whole = float(delta_sq.sum(where=is_usable))
        if not (0 < whole < np.inf and 0 < trimmed.kept_sq < np.inf and rms > 0):
            continue
        explained = max(0.0, 1 - float(left.sum(where=is_usable, dtype=np.float64)) / whole)
        target_sq = trimmed.kept_sq * (_LEAST_KEPT + _MORE_KEPT * explained) ** 2
        # [lengths]: what is kept of δ̂ that is so long.
        kept_sq = trimmed.numel * np.square(rms * _LENGTHS)
        kept_sq *= _above(magnitudes, trimmed.least / _LENGTHS)
        length = np.interp(target_sq, kept_sq, _LENGTHS)
        lengths[level] = np.rint(length * _PER_LENGTH) / _PER_LENGTH
    return lengths


def _above(magnitudes: list[float], least: F64Array) -> F64Array:
    """The share of ‖δ̂‖² in elements above each of some magnitudes."""
    return np.interp(least, magnitudes[::-1], np.linspace(1, 0, len(magnitudes)))
