"""L1 rescale factors of sparsified deltas: ‖δ‖₁ over what is left of it, per whole tensor.

mergekit's rescale (its pull request 245), computed from the same masks and rules the engine
applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.analysis.stream import CHUNK_ELEMS, DeltaWindow, PairReader
from mergepipe_pipeline.operators.random import keep_mask
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.plan import TrimRule
from mergepipe_pipeline.spec.stats import ExpertStats

_TINY = 1e-7
Mask = npt.NDArray[np.bool_]
Keep = Callable[[str, DeltaWindow], Mask]


def drop_scales(
    expert: Checkpoint,
    base: Checkpoint,
    stats: ExpertStats,
    densities: Mapping[str, float],
    *,
    position: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Factors for DARE's random drop: tensor name to ‖δ‖₁/‖drop(δ)‖₁, 1 if either is below 1e-7."""

    def keep(tensor: str, w: DeltaWindow) -> Mask:
        return keep_mask(seed, position, tensor, w.start_elem, w.n, densities[tensor])

    return _scales(expert, base, stats, list(densities), keep, progress)


def trim_scales(
    expert: Checkpoint,
    base: Checkpoint,
    stats: ExpertStats,
    rules: Mapping[str, TrimRule],
    *,
    progress: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Factors for a trim: tensor name to ‖δ‖₁/‖trim(δ)‖₁, 1 if either is below 1e-7."""

    def keep(tensor: str, w: DeltaWindow) -> Mask:
        bits, rule = np.abs(w.values).view(np.uint32), rules[tensor]
        before = np.arange(w.start_elem, w.start_elem + w.n) < rule.tie_stop_elem
        kept: Mask = (bits > rule.threshold_bits) | ((bits == rule.threshold_bits) & before)
        return kept

    return _scales(expert, base, stats, list(rules), keep, progress)


def _scales(
    expert: Checkpoint,
    base: Checkpoint,
    stats: ExpertStats,
    tensors: list[str],
    keep: Keep,
    progress: Callable[[int], None] | None,
) -> dict[str, float]:
    total = {t.tensor: t.l1 for t in stats.tensors}
    scales = {}
    with PairReader(expert, base) as pair:
        for tensor in tensors:
            kept: list[float] = []
            for nbytes, sums in pair.map(tensor, partial(_kept_l1, tensor, keep)):
                kept.extend(sums.tolist())
                if progress:
                    progress(nbytes)
            left = math.fsum(kept)
            scales[tensor] = total[tensor] / left if min(left, total[tensor]) >= _TINY else 1.0
        pair.verify_unchanged()
    return scales


def _kept_l1(tensor: str, keep: Keep, window: DeltaWindow) -> tuple[int, npt.NDArray[np.float64]]:
    magnitude = np.abs(window.delta)
    magnitude[: window.n] *= keep(tensor, window)
    sums = np.asarray(magnitude.reshape(-1, CHUNK_ELEMS).sum(axis=1, dtype=np.float64))
    return len(window.expert_raw), sums
