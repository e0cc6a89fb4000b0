"""The part of a delta's squared norm that sparsifying keeps, from a histogram of magnitudes.

A threshold belongs to the whole tensor; blocks are taken to have the tensor's distribution,
stretched to their own size. Near an ulp many |δ| are equal: of those at a threshold, a trim keeps
only as many as fit, so that what a tensor keeps follows from how many elements are kept.

Many tensors are estimated at once: their bins, and their blocks, stand one after another in arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F64Array, I64Array
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.domain.stats import HIST_SHIFT, Histogram, Kept, TensorStats

_ALL_BINS = 1 << 16
#: Tensors that are estimated together: arrays of more no longer stay in a core's cache.
_AT_ONCE = 32


class Sparse(NamedTuple):
    """A tensor and the part of its δ that is kept: above `trim`, not above `outliers`.

    None stands for no threshold. `counts`: how many of the largest |δ| are above the one and the
    other.
    """

    stats: TensorStats
    histogram: Histogram
    trim: TrimRule | None
    outliers: TrimRule | None
    counts: tuple[int, int]


def kept_sq_norms(tensors: Sequence[Sparse], grid: BlockGrid) -> list[Kept]:
    """Estimate what is kept of each tensor's δ; `most` is infinite where δ is not finite."""
    kept = [Kept(t.stats.block_l2sq, 0.0 if t.stats.l2sq == 0 else np.inf) for t in tensors]
    plain = [n for n, t in enumerate(tensors) if 0 < t.stats.l2sq < np.inf]
    for start in range(0, len(plain), _AT_ONCE):
        some = plain[start : start + _AT_ONCE]
        for n, found in zip(some, _estimated([tensors[n] for n in some], grid), strict=True):
            kept[n] = found
    return kept


def _estimated(tensors: Sequence[Sparse], grid: BlockGrid) -> list[Kept]:
    """Do as `kept_sq_norms` for tensors whose squared norms are above 0 and finite."""
    l2sq = np.array([t.stats.l2sq for t in tensors])  # [tensors], as all up to `expected`
    low = np.array([t.trim.threshold if t.trim else 0.0 for t in tensors])
    high = np.array([t.outliers.threshold if t.outliers else np.inf for t in tensors])
    curves = _Curves(tensors)
    most = np.minimum(curves.most(_bins_of(low), _bins_of(high)), l2sq * (1 + 1e-9))
    kept, above = (curves.largest(n) for n in np.array([t.counts for t in tensors]).T)
    expected = np.minimum(most, l2sq * (kept - above))

    n_blocks = np.array([len(t.stats.block_l2sq) for t in tensors])
    of = np.repeat(np.arange(len(tensors)), n_blocks)  # [blocks of all tensors], as all below
    block_l2sq = np.concatenate([t.stats.block_l2sq for t in tensors])
    is_high = np.concatenate([t.stats.block_max_abs for t in tensors]) >= low[of]
    numel = np.array([t.stats.numel for t in tensors])
    lengths = np.minimum(grid.block_elems, numel[of] - _numbered(n_blocks) * grid.block_elems)
    own, mean = np.sqrt(block_l2sq / lengths), np.sqrt(l2sq / numel)[of]
    stretch = np.divide(mean, own, out=np.ones_like(own), where=own > 0)
    share = curves.above(of, low[of] * stretch) - curves.above(of, high[of] * stretch)
    sq_norm = np.where(is_high, block_l2sq * np.maximum(share, 0), 0)
    # Blocks also differ in shape: the sum over all of them has to be what the histogram says.
    total = np.bincount(of, sq_norm)
    scale = np.divide(expected, total, out=np.ones_like(total), where=total > 0)
    sq_norm = np.minimum(block_l2sq, sq_norm * scale[of])
    # Thresholds cannot tell it where both are one magnitude: then all blocks get a part.
    left = np.where(is_high, block_l2sq - sq_norm, 0)
    missing, room = expected - np.bincount(of, sq_norm), np.bincount(of, left)
    part = np.divide(missing, room, out=np.zeros_like(room), where=room > 0)
    sq_norm += left * np.clip(part, 0, 1)[of]
    by_tensor = np.split(sq_norm, np.cumsum(n_blocks)[:-1])
    return [Kept(*both) for both in zip(by_tensor, most.tolist(), strict=True)]


def _bins_of(thresholds: F64Array) -> I64Array:
    """The bins of thresholds, which are float32 numbers."""
    bits: I64Array = thresholds.astype(np.float32).view(np.uint32).astype(np.int64) >> HIST_SHIFT
    return bits


class _Curves:
    """How much of each tensor's squared norm its larger |δ| have, as its histogram says."""

    def __init__(self, tensors: Sequence[Sparse]) -> None:
        lower, middle = _edges()
        n_bins = np.array([len(t.histogram[0]) for t in tensors])  # [tensors], as both below
        self._stop = np.cumsum(n_bins)
        self._start = self._stop - n_bins
        #: Ascending in each tensor; [bins of all tensors], as all below.
        self._bins = np.concatenate([t.histogram[0] for t in tensors]).astype(np.int64)
        self._counts = np.concatenate([t.histogram[1] for t in tensors])
        self._keys = np.repeat(np.arange(len(tensors)) * _ALL_BINS, n_bins) + self._bins
        # No element is larger than the upper edge of its bin.
        self._upper = lower[self._bins + 1]
        share = self._counts * middle[self._bins] ** 2
        share /= np.repeat(np.add.reduceat(share, self._start), n_bins)
        #: What all bins before one have: of elements, and of each tensor's squared norm.
        self._n_before = np.append(0, np.cumsum(self._counts))
        self._share_before = np.append(0.0, np.cumsum(share))

    def most(self, lowest: I64Array, highest: I64Array) -> F64Array:
        """[tensors]: what bins from `lowest` to `highest` can hold at most."""
        n_bins = self._stop - self._start
        is_kept = self._bins >= np.repeat(lowest, n_bins)
        is_kept &= self._bins <= np.repeat(highest, n_bins)
        most: F64Array = np.add.reduceat(is_kept * self._counts * self._upper**2, self._start)
        return most

    def largest(self, counts: I64Array) -> F64Array:
        """[tensors]: the share of the squared norm that so many of the largest elements have."""
        others = self._n_before[self._stop] - counts
        bins = np.searchsorted(self._n_before, others, side="right") - 1
        bins = np.clip(bins, self._start, self._stop - 1)
        part = np.minimum((self._n_before[bins + 1] - others) / self._counts[bins], 1)
        before, after = self._share_before[bins], self._share_before[bins + 1]
        shares: F64Array = self._share_before[self._stop] - after + (after - before) * part
        return shares

    def above(self, of: I64Array, magnitudes: F64Array) -> F64Array:
        """[magnitudes]: the share that larger |δ| of the tensors `of` have, even inside a bin."""
        lower, _ = _edges()
        keys = of * _ALL_BINS + np.searchsorted(lower, magnitudes, side="right") - 1
        bins = np.searchsorted(self._keys, keys, side="right") - 1
        bins = np.maximum(bins, self._start[of])
        first, before = lower[self._bins[bins]], self._share_before[bins]
        part = np.clip((magnitudes - first) / (self._upper[bins] - first), 0, 1)
        own = self._share_before[bins + 1] - before
        shares: F64Array = self._share_before[self._stop[of]] - before - own * part
        return shares


def _numbered(counts: I64Array) -> I64Array:
    """0, 1, 2 … for each of the counts."""
    numbers: I64Array = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return numbers


@cache
def _edges() -> tuple[F64Array, F64Array]:
    """The lowest magnitude and the middle of every bin and of one more."""
    bins = np.arange(_ALL_BINS + 1, dtype=np.uint64)
    return _edge(bins, 0), _edge(bins, 0.5)


def _edge(bins: npt.NDArray[np.uint64], part: float) -> F64Array:
    """The magnitude at a part of each bin's width."""
    bits = (bins << np.uint64(HIST_SHIFT)) + np.uint64(part * (1 << HIST_SHIFT))
    largest = np.uint64(np.finfo(np.float32).max.view(np.uint32))
    edges: F64Array = (
        np.minimum(bits, largest).astype(np.uint32).view(np.float32).astype(np.float64)
    )
    return edges
