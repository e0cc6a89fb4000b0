"""Exact order statistics of a score over a whole tensor, without sorting or holding a tensor.

A histogram of the upper bits of the scores says in which bin a rank lies; one pass counts inside
that bin; one more window tells where ties are cut. Scores are non-negative float32: their bit
patterns order as they do. Where the catalog lists the |δ| that occur, no weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from mergepipe_pipeline.arrays import I64Array, U16Array, U32Array
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.domain.stats import HIST_SHIFT, Magnitudes, TensorStats

T = TypeVar("T")

#: Keeps nothing: no magnitude is above infinity.
KEEP_NONE = TrimRule(0x7F800000, 0)
#: Keeps every element that is not zero.
KEEP_ALL = TrimRule(0, 0)

_LOW = (1 << HIST_SHIFT) - 1
#: Scores that are looked at together: they fit the CPU's cache.
_PART = 1 << 15
_BINS = 1 << (32 - HIST_SHIFT - 1)


@dataclass(frozen=True)
class InBin:
    """Low bits of one window's scores in a bin, ascending, with counts, in the narrowest types.

    One of these is held for every window of a tensor.
    """

    low: U16Array
    counts: U32Array


class Scores(Protocol):
    """The scores of a tensor, window by window."""

    def map(self, work: Callable[[int, U32Array], T], only: int | None = None) -> Iterator[T]:
        """`work(start_elem, bits)` for each window in order, or for the one numbered `only`."""
        ...


@dataclass(frozen=True)
class Histogram:
    """Occupied bins of bits >> HIST_SHIFT, ascending, and how many scores lie in each."""

    bins: I64Array
    counts: I64Array

    @staticmethod
    def of(scores: Scores) -> Histogram:
        """The histogram by one pass."""
        total = np.zeros(_BINS, dtype=np.int64)
        for counts in scores.map(lambda _, bits: _high_counts(bits)):
            total += counts
        bins = np.flatnonzero(total)
        return Histogram(bins, total[bins])


def keep_largest(scores: Scores, histogram: Histogram, keep: int) -> TrimRule:
    """The rule that keeps exactly the `keep` largest scores, among equals those of lowest index."""
    if keep <= 0:
        return KEEP_NONE
    if keep >= int(histogram.counts.sum()):
        return TrimRule(0, 1 << 62)
    bin_, above = from_top(histogram.bins, histogram.counts, keep)
    windows = _in_bin(scores, bin_)
    values, totals = _totals(windows)
    low, above_low = from_top(values, totals, keep - above)
    bits = (bin_ << HIST_SHIFT) | low
    ties = keep - above - above_low
    for number, w in enumerate(windows):
        here = int(w.counts[w.low == low].sum())
        if ties <= here:
            ((start, equal),) = scores.map(
                lambda start, scored: (start, np.flatnonzero(scored == bits)), only=number
            )
            return TrimRule(bits, start + int(equal[ties - 1]) + 1)
        ties -= here
    raise AssertionError("the histogram counted more scores than the tensor has")


def bits_at(scores: Scores, histogram: Histogram, rank: int) -> int:
    """The bits of the score at 0-based ascending `rank`."""
    keep = int(histogram.counts.sum()) - rank
    bin_, above = from_top(histogram.bins, histogram.counts, keep)
    values, totals = _totals(_in_bin(scores, bin_))
    low, _ = from_top(values, totals, keep - above)
    return (bin_ << HIST_SHIFT) | low


def _totals(windows: list[InBin]) -> tuple[I64Array, I64Array]:
    totals = np.zeros(_LOW + 1, dtype=np.int64)
    for w in windows:
        totals[w.low] += w.counts
    values = np.flatnonzero(totals)
    return values, totals[values]


def from_top(values: I64Array, counts: I64Array, keep: int) -> tuple[int, int]:
    """The value where counting down from the largest reaches `keep`, and how many lie above."""
    cumulative = np.cumsum(counts[::-1])
    at = int(np.searchsorted(cumulative, keep))
    return int(values[::-1][at]), int(cumulative[at] - counts[::-1][at])


def _in_bin(scores: Scores, bin_: int) -> list[InBin]:
    """For each window in order, what of it lies in a bin of the histogram."""

    def count(_: int, bits: U32Array) -> InBin:
        parts = np.split(bits, range(_PART, len(bits), _PART))
        inside = np.concatenate([part[part >> HIST_SHIFT == bin_] for part in parts])
        low, counts = np.unique(inside & _LOW, return_counts=True)
        return InBin(low.astype(np.uint16), counts.astype(np.uint32))

    return list(scores.map(count))


def _high_counts(bits: U32Array) -> I64Array:
    return np.bincount((bits >> HIST_SHIFT).astype(np.int32), minlength=_BINS)


def plain_rule(stats: TensorStats, keep: int) -> TrimRule | None:
    """The rule that keeps the `keep` largest |δ|, where it keeps none or all that are not zero."""
    if keep <= 0:
        return KEEP_NONE
    # Where more are kept, ties at the cut are zeros: which is kept is moot.
    return KEEP_ALL if keep >= stats.nonzero else None


def open_rule(stats: TensorStats, magnitudes: Magnitudes, keep: int, block_elems: int) -> TrimRule:
    """The rule that keeps exactly the `keep` largest |δ|, ties by lowest index; perhaps open.

    A list per block does not show at which element ties are cut: such a rule stays open by block,
    and the reader of that block closes it.
    """
    if rule := plain_rule(stats, keep):
        return rule
    bin_, above = from_top(stats.hist_bins.astype(np.int64), stats.hist_counts, keep)
    inside = np.flatnonzero(magnitudes.bits >> np.uint32(HIST_SHIFT) == bin_)
    counts = magnitudes.counts[inside].astype(np.int64)
    bits, which = np.unique(magnitudes.bits[inside], return_inverse=True)
    totals = np.bincount(which, counts).astype(np.int64)
    threshold, larger = from_top(bits.astype(np.int64), totals, keep - above)
    tied = np.flatnonzero(bits[which] == threshold)
    ties, up_to = keep - above - larger, np.cumsum(counts[tied])
    at = int(np.searchsorted(up_to, ties))
    block = int(np.searchsorted(magnitudes.edges, inside[tied[at]], side="right")) - 1
    start, stop = BlockGrid(block_elems).range_of(block, stats.numel)
    if ties == up_to[at]:
        return TrimRule(threshold, stop)
    return TrimRule(threshold, start, int(ties - up_to[at] + counts[tied[at]]), stop)
