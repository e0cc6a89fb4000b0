"""The part of a delta's squared norm that sparsifying keeps, from a histogram of magnitudes.

A threshold belongs to the whole tensor; blocks are taken to have the tensor's distribution,
stretched to their own size. Near an ulp many |δ| are equal: of those at a threshold, a trim keeps
only as many as fit, so that what a tensor keeps follows from how many elements are kept.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F32Array, F64Array, I64Array, U16Array
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.domain.stats import HIST_SHIFT, Kept, TensorStats
from mergepipe_pipeline.jit import cached_njit


class _Delta(NamedTuple):
    """A tensor's histogram [bins] and its blocks [blocks].

    `bins` are occupied by `counts` of |δ|; by bin [all bins], they start at `lower` and have their
    middle at `middle`. `numel` elements, `block_elems` a block, have the squared norm `l2sq`.
    """

    bins: U16Array
    counts: I64Array
    lower: F64Array
    middle: F64Array
    block_l2sq: F64Array
    block_max_abs: F32Array
    block_elems: int
    numel: int
    l2sq: float


def kept_sq_norm(
    stats: TensorStats,
    grid: BlockGrid,
    trim: TrimRule | None,
    outliers: TrimRule | None,
    counts: tuple[int, int],
) -> Kept:
    """Estimate what is kept of δ above `trim` and not above `outliers` (None: no threshold).

    `counts`: how many of the largest |δ| are above the one and the other.
    """
    if not 0 < stats.l2sq < np.inf:
        return Kept(stats.block_l2sq, stats.l2sq if stats.l2sq == 0 else np.inf)
    bins = stats.hist_bins
    lowest = trim.threshold_bits >> HIST_SHIFT if trim else 0
    highest = outliers.threshold_bits >> HIST_SHIFT if outliers else int(bins[-1])
    delta = _Delta(
        bins,
        stats.hist_counts,
        *_edges(),
        stats.block_l2sq,
        stats.block_max_abs,
        grid.block_elems,
        stats.numel,
        stats.l2sq,
    )
    sq_norm = np.empty(len(stats.block_l2sq))
    limits = trim.threshold if trim else 0.0, outliers.threshold if outliers else np.inf
    return Kept(sq_norm, _keep(delta, limits, (lowest, highest), counts, sq_norm))


@cached_njit(nogil=True)
def _keep(
    delta: _Delta,
    limits: tuple[float, float],
    kept_bins: tuple[int, int],
    counts: tuple[int, int],
    sq_norm: F64Array,
) -> float:
    """Fill `sq_norm` [blocks] with what is kept of δ's from `limits[0]` up to `limits[1]`.

    They are the largest `counts[0]` without the largest `counts[1]`. Return the most that bins
    `kept_bins[0]` to `kept_bins[1]` can hold.
    """
    bins, l2sq = delta.bins, delta.l2sq
    n = len(bins)
    edges, above = np.zeros(n + 1), np.zeros(n + 1)
    edges[n] = delta.lower[bins[n - 1] + 1]
    most = 0.0
    for k in range(n - 1, -1, -1):
        edges[k] = delta.lower[bins[k]]
        above[k] = above[k + 1] + delta.counts[k] * delta.middle[bins[k]] ** 2
        if kept_bins[0] <= bins[k] <= kept_bins[1]:
            # No element is larger than the upper edge of its bin.
            most += delta.counts[k] * delta.lower[bins[k] + 1] ** 2
    most = min(most, l2sq * (1 + 1e-9))
    if above[0] > 0:
        above /= above[0]
    _guess(delta, edges, above, limits, sq_norm)
    # Blocks also differ in shape: the sum over all of them has to be what the histogram says.
    share = _largest_share(delta, above, counts[0]) - _largest_share(delta, above, counts[1])
    _scale(delta, limits[0], min(most, l2sq * share), sq_norm)
    return most


@cached_njit(nogil=True)
def _guess(
    delta: _Delta,
    edges: F64Array,
    above: F64Array,
    limits: tuple[float, float],
    sq_norm: F64Array,
) -> None:
    """Fill `sq_norm` with what each block keeps if it has the tensor's shape, stretched."""
    mean = np.sqrt(delta.l2sq / delta.numel)
    for b in range(len(sq_norm)):
        length = min(delta.block_elems, delta.numel - b * delta.block_elems)
        own = np.sqrt(delta.block_l2sq[b] / length)
        stretch = mean / own if own > 0 else 1.0
        sq_norm[b] = 0.0
        if delta.block_max_abs[b] >= limits[0]:
            sq_norm[b] = delta.block_l2sq[b] * _share(edges, above, limits, stretch)


@cached_njit(nogil=True)
def _scale(delta: _Delta, threshold: float, expected: float, sq_norm: F64Array) -> None:
    """Bring the sum of `sq_norm` to what is expected, no block above its own norm."""
    total = 0.0
    for kept in sq_norm:
        total += kept
    scale = expected / total if total > 0 else 1.0
    missing, room = expected, 0.0
    for b in range(len(sq_norm)):
        sq_norm[b] = min(delta.block_l2sq[b], sq_norm[b] * scale)
        missing -= sq_norm[b]
        if delta.block_max_abs[b] >= threshold:
            room += delta.block_l2sq[b] - sq_norm[b]
    # Thresholds cannot tell it where both are one magnitude: then all blocks get a part.
    part = min(1.0, missing / room) if missing > 0 and room > 0 else 0.0
    for b in range(len(sq_norm)):
        if delta.block_max_abs[b] >= threshold:
            sq_norm[b] += (delta.block_l2sq[b] - sq_norm[b]) * part


@cached_njit(nogil=True)
def _largest_share(delta: _Delta, above: F64Array, count: int) -> float:
    """The share of the squared norm that the largest `count` elements have."""
    for k in range(len(delta.bins) - 1, -1, -1):
        if count <= delta.counts[k]:
            return float(above[k + 1] + (above[k] - above[k + 1]) * count / delta.counts[k])
        count -= delta.counts[k]
    return float(above[0])


@cached_njit(nogil=True)
def _share(edges: F64Array, above: F64Array, limits: tuple[float, float], stretch: float) -> float:
    """The share of the squared norm between both limits, stretched."""
    low, high = limits
    return max(_above(edges, above, low * stretch) - _above(edges, above, high * stretch), 0.0)


@cached_njit(nogil=True)
def _above(edges: F64Array, above: F64Array, magnitude: float) -> float:
    """`above` at a magnitude, straight from edge to edge."""
    k = np.searchsorted(edges, magnitude, side="right")
    if k == 0:
        return float(above[0])
    if k == len(edges):
        return float(above[-1])
    part = (magnitude - edges[k - 1]) / (edges[k] - edges[k - 1])
    return float(above[k - 1] + part * (above[k] - above[k - 1]))


@cache
def _edges() -> tuple[F64Array, F64Array]:
    """The lowest magnitude and the middle of every bin and of one more."""
    bins = np.arange((1 << 16) + 1, dtype=np.uint64)
    return _edge(bins, 0), _edge(bins, 0.5)


def _edge(bins: npt.NDArray[np.uint64], part: float) -> F64Array:
    """The magnitude at a part of each bin's width."""
    bits = (bins << np.uint64(HIST_SHIFT)) + np.uint64(part * (1 << HIST_SHIFT))
    largest = np.uint64(np.finfo(np.float32).max.view(np.uint32))
    edges: F64Array = (
        np.minimum(bits, largest).astype(np.uint32).view(np.float32).astype(np.float64)
    )
    return edges
