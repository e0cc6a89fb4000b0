"""Exact trim thresholds from what the catalog lists of |δ|, without a read of any weight.

A list per block does not show at which element ties are cut: such a rule stays open by block,
and the reader of that block closes it. TIES: https://arxiv.org/abs/2306.01708.
"""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.analysis.order import KEEP_ALL, KEEP_NONE, from_top
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.domain.stats import HIST_SHIFT, Magnitudes, TensorStats


def plain_rule(stats: TensorStats, keep: int) -> TrimRule | None:
    """The rule that keeps the `keep` largest |δ|, where it keeps none or all that are not zero."""
    if keep <= 0:
        return KEEP_NONE
    # Where more are kept, ties at the cut are zeros: which is kept is moot.
    return KEEP_ALL if keep >= stats.nonzero else None


def open_rule(stats: TensorStats, magnitudes: Magnitudes, keep: int, block_elems: int) -> TrimRule:
    """The rule that keeps exactly the `keep` largest |δ|, ties by lowest index; perhaps open."""
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
