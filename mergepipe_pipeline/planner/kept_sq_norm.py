"""The part of a delta's squared norm that sparsifying keeps, from a histogram of magnitudes.

A threshold belongs to the whole tensor; blocks are taken to have the tensor's distribution,
stretched to their own size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F64Array, U16Array
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.domain.stats import HIST_SHIFT, TensorStats


@dataclass(frozen=True)
class Kept:
    """`block_sq_norm` [blocks]: the expected part of Σδ² that is kept; `most`: an upper limit."""

    block_sq_norm: F64Array
    most: float


def kept_sq_norm(
    stats: TensorStats, grid: BlockGrid, trim: TrimRule | None, outliers: TrimRule | None
) -> Kept:
    """What is kept of δ above threshold `trim` and not above `outliers` (None: no threshold)."""
    if not 0 < stats.l2sq < np.inf:
        return Kept(stats.block_l2sq, stats.l2sq if stats.l2sq == 0 else np.inf)
    from mergepipe_pipeline.planner.compiled import keep

    sq_norm = np.empty(len(stats.block_l2sq))
    bins = stats.hist_bins
    lowest = trim.threshold_bits >> HIST_SHIFT if trim else 0
    highest = outliers.threshold_bits >> HIST_SHIFT if outliers else int(bins[-1])
    most = keep(
        bins,
        stats.hist_counts,
        *_edges(),
        stats.block_l2sq,
        stats.block_max_abs,
        grid.block_elems,
        stats.numel,
        stats.l2sq,
        (_magnitude(trim, 0.0), _magnitude(outliers, np.inf)),
        (lowest, highest),
        sq_norm,
    )
    return Kept(sq_norm, most)


def kurtosis(stats: TensorStats) -> float:
    """N·Σδ⁴/(Σδ²)² of the whole tensor: 3 for normal deltas, N/n where n equal ones differ."""
    square = np.square(_edge(stats.hist_bins, 0.5))
    second = float((stats.hist_counts * square).sum())
    fourth = float((stats.hist_counts * np.square(square)).sum())
    return stats.numel * fourth / second**2 if stats.l2sq > 0 else 3.0


def _magnitude(rule: TrimRule | None, default: float) -> float:
    return float(np.uint32(rule.threshold_bits).view(np.float32)) if rule else default


@cache
def _edges() -> tuple[F64Array, F64Array]:
    """Of every bin and the one after the last: lowest magnitude and middle."""
    bins = np.arange((1 << 16) + 1, dtype=np.uint64)
    return _edge(bins, 0), _edge(bins, 0.5)


def _edge(bins: npt.NDArray[np.uint64] | U16Array, part: float) -> F64Array:
    bits = (bins.astype(np.uint64) << np.uint64(HIST_SHIFT)) + np.uint64(part * (1 << HIST_SHIFT))
    largest = np.uint64(np.finfo(np.float32).max.view(np.uint32))
    edges: F64Array = (
        np.minimum(bits, largest).astype(np.uint32).view(np.float32).astype(np.float64)
    )
    return edges
