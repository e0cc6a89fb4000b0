"""Passes that are compiled: NumPy would write each step of them to memory, or start too many.

`cosine` is float32 [blocks, E, E]; `there` [blocks, E] says which deltas are not zero.
"""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, F32Array, F64Array, I64Array, U16Array
from mergepipe_pipeline.domain.stats import SKETCH_WIDTH
from mergepipe_pipeline.jit import cached_njit


@cached_njit(nogil=True)
def straighten(cosine: F32Array) -> None:
    """Undo the bias of sketches' cosines, in place, and set the diagonal to 1.

    A cosine of few numbers is too near zero on average (Olkin and Pratt 1958).
    """
    blocks, count, _ = cosine.shape
    half = np.float32(0.5 / SKETCH_WIDTH)
    one = np.float32(1)
    for b in range(blocks):
        for i in range(count):
            for j in range(count):
                c = cosine[b, i, j]
                c *= one + (one - c * c) * half
                cosine[b, i, j] = min(max(c, -one), one)
            cosine[b, i, i] = one


@cached_njit(nogil=True)
def add_spread(cosine: F32Array, there: BoolArray, whole: F32Array, spread: F64Array) -> None:
    """Add to `spread` [E, E] the squares by which blocks differ from `whole` [E, E]."""
    blocks, count, _ = cosine.shape
    for b in range(blocks):
        for i in range(count):
            if there[b, i]:
                for j in range(count):
                    off = cosine[b, i, j] - whole[i, j]
                    spread[i, j] += off * off if there[b, j] else np.float32(0)


@cached_njit(nogil=True)
def shrink(
    cosine: F32Array, there: BoolArray, whole: F32Array, own: F32Array, centre: F32Array
) -> None:
    """Keep the part `own` [E, E] of what blocks differ by from `whole`, around `centre`; in place.

    The diagonal stays 1, and what is zero has cosine 0 with all others.
    """
    blocks, count, _ = cosine.shape
    for b in range(blocks):
        for i in range(count):
            for j in range(count):
                c = (cosine[b, i, j] - whole[i, j]) * own[i, j] + centre[i, j]
                cosine[b, i, j] = c if there[b, i] and there[b, j] else np.float32(0)
            cosine[b, i, i] = np.float32(1)


@cached_njit(nogil=True)
def quadratic(cosine: F32Array, size: F64Array, value: F64Array, variance: F64Array) -> None:
    """Per block Σᵢⱼ sizeᵢ sizeⱼ cosineᵢⱼ and the variance that sketches give it.

    `size` [blocks, E] is 0 for what takes no part; fills `value` and `variance` [blocks]. By the
    delta method: a sketch's entries are normal with the deltas' covariance, and norms are known, so
    what errs is Σᵢⱼ sizeᵢ sizeⱼ xᵢxⱼ − Σᵢ (sizeᵢ pullᵢ) xᵢ², with x of unit variances.
    """
    blocks, count = size.shape
    weight = np.zeros(count)
    for b in range(blocks):
        total, bent = 0.0, 0.0
        for i in range(count):
            pull = 0.0
            if size[b, i] != 0:
                for j in range(count):
                    pull += cosine[b, i, j] * size[b, j]
            weight[i] = size[b, i] * pull
            total += weight[i]
            bent += weight[i] * pull * pull
        shared = 0.0
        for i in range(count):
            if weight[i] != 0:
                row = 0.0
                for j in range(count):
                    row += cosine[b, i, j] * cosine[b, i, j] * weight[j]
                shared += weight[i] * row
        value[b] = total
        variance[b] = max(total * total - 2 * bent + shared, 0.0) * (2.0 / SKETCH_WIDTH)


@cached_njit(nogil=True)
def keep(
    bins: U16Array,
    counts: I64Array,
    lower: F64Array,
    middle: F64Array,
    block_l2sq: F64Array,
    block_max_abs: F32Array,
    block_elems: int,
    numel: int,
    l2sq: float,
    limits: tuple[float, float],
    kept_bins: tuple[int, int],
    sq_norm: F64Array,
) -> float:
    """Fill `sq_norm` [blocks] with what is kept of δ's from `limits[0]` up to `limits[1]`.

    `counts` of δ's lie in histogram bins `bins`, whose magnitudes start at `lower` and have their
    middle at `middle` (both by bin). Blocks are taken to have the tensor's distribution, stretched
    to their own size. Gives the most that bins `kept_bins[0]` to `kept_bins[1]` can hold.
    """
    n = len(bins)
    edges, above = np.zeros(n + 1), np.zeros(n + 1)
    edges[n] = lower[bins[n - 1] + 1]
    most = 0.0
    for k in range(n - 1, -1, -1):
        edges[k] = lower[bins[k]]
        above[k] = above[k + 1] + counts[k] * middle[bins[k]] ** 2
        if kept_bins[0] <= bins[k] <= kept_bins[1]:
            # No element is larger than the upper edge of its bin.
            most += counts[k] * lower[bins[k] + 1] ** 2
    most = min(most, l2sq * (1 + 1e-9))
    if above[0] > 0:
        above /= above[0]
    mean, total = np.sqrt(l2sq / numel), 0.0
    for b in range(len(block_l2sq)):
        own = np.sqrt(block_l2sq[b] / min(block_elems, numel - b * block_elems))
        stretch = mean / own if own > 0 else 1.0
        sq_norm[b] = 0.0
        if block_max_abs[b] >= limits[0]:
            sq_norm[b] = block_l2sq[b] * _share(edges, above, limits, stretch)
        total += sq_norm[b]
    # Blocks also differ in shape: the sum over all of them has to be what the histogram says.
    expected = min(most, l2sq * _share(edges, above, limits, 1.0))
    scale = expected / total if total > 0 else 1.0
    for b in range(len(block_l2sq)):
        sq_norm[b] = min(block_l2sq[b], sq_norm[b] * scale)
    return most


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
