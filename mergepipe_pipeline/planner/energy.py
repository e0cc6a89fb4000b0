"""What a sparsifying method keeps of a delta's energy, from a tensor's histogram of magnitudes.

A threshold belongs to the whole tensor; blocks are taken to have the tensor's distribution,
stretched to their own size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.planner.candidates import Floats
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.plan import TrimRule
from mergepipe_pipeline.spec.stats import HIST_SHIFT, TensorStats


@dataclass(frozen=True)
class Kept:
    """`block_energy` [blocks]: the expected part of Σδ² that is kept; `most`: an upper limit."""

    block_energy: Floats
    most: float


def kept_energy(
    stats: TensorStats, grid: BlockGrid, trim: TrimRule | None, outliers: TrimRule | None
) -> Kept:
    """What is kept of δ above threshold `trim` and not above `outliers` (None: no threshold)."""
    if not 0 < stats.l2sq < np.inf:
        return Kept(stats.block_l2sq, stats.l2sq if stats.l2sq == 0 else np.inf)
    magnitudes, above = _energy_above(stats)
    lengths = np.minimum(
        grid.block_elems, stats.numel - grid.block_elems * np.arange(len(stats.block_l2sq))
    )
    own = np.sqrt(stats.block_l2sq / lengths)
    stretch = np.divide(
        np.sqrt(stats.l2sq / stats.numel), own, where=own > 0, out=np.ones_like(own)
    )
    least, largest = _magnitude(trim, 0.0), _magnitude(outliers, np.inf)

    def between(stretch: Floats) -> Floats:
        share: Floats = np.interp(least * stretch, magnitudes, above)
        return np.maximum(share - np.interp(largest * stretch, magnitudes, above), 0)

    energy = stats.block_l2sq * np.where(stats.block_max_abs < least, 0, between(stretch))
    # What blocks differ in besides their size shows in the sum, which the histogram knows.
    most = _most(stats, trim, outliers)
    total = min(most, stats.l2sq * float(between(np.ones(1))[0]))
    scale = total / energy.sum() if energy.sum() > 0 else 1.0
    return Kept(np.minimum(stats.block_l2sq, energy * scale), most)


def kurtosis(stats: TensorStats) -> float:
    """N·Σδ⁴/(Σδ²)² of the whole tensor: 3 for normal deltas, N/n where n equal ones differ."""
    square = np.square(_edge(stats.hist_bins, 0.5))
    second = float((stats.hist_counts * square).sum())
    fourth = float((stats.hist_counts * np.square(square)).sum())
    return stats.numel * fourth / second**2 if stats.l2sq > 0 else 3.0


def _magnitude(rule: TrimRule | None, default: float) -> float:
    return float(np.uint32(rule.threshold_bits).view(np.float32)) if rule else default


def _energy_above(stats: TensorStats) -> tuple[Floats, Floats]:
    """Bins' lowest magnitudes, ascending, and the share of the energy in them and above."""
    middle = _edge(stats.hist_bins, 0.5)
    energy = stats.hist_counts * np.square(middle)
    above = np.cumsum(energy[::-1])[::-1]
    edges = np.append(_edge(stats.hist_bins, 0), _edge(stats.hist_bins[-1:], 1))
    return edges, np.append(above / above[0], 0.0) if above[0] > 0 else np.zeros(len(edges))


def _edge(bins: npt.NDArray[np.uint16], part: float) -> Floats:
    bits = (bins.astype(np.uint32) << np.uint32(HIST_SHIFT)) + np.uint32(part * (1 << HIST_SHIFT))
    largest = np.finfo(np.float32).max.view(np.uint32)
    edges: Floats = np.minimum(bits, largest).view(np.float32).astype(np.float64)
    return edges


def _most(stats: TensorStats, trim: TrimRule | None, outliers: TrimRule | None) -> float:
    """No element is larger than the upper edge of its bin."""
    first = 0 if trim is None else trim.threshold_bits >> HIST_SHIFT
    last = stats.hist_bins[-1] if outliers is None else outliers.threshold_bits >> HIST_SHIFT
    inside = (stats.hist_bins >= first) & (stats.hist_bins <= last)
    most = float((stats.hist_counts * np.square(_edge(stats.hist_bins, 1)))[inside].sum())
    return min(most, stats.l2sq * (1 + 1e-9))
