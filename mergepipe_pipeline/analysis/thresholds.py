"""Exact trim thresholds of whole tensors, without sorting and without holding a tensor.

The catalog's histogram says in which bin the k-th largest magnitude lies; one pass counts inside
that bin; one more window tells where the ties at the threshold are cut. TIES:
https://arxiv.org/abs/2306.01708.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.analysis.stream import DeltaWindow, PairReader
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.plan import TrimRule
from mergepipe_pipeline.spec.stats import HIST_SHIFT, ExpertStats, TensorStats

_LOW = (1 << HIST_SHIFT) - 1


@dataclass(frozen=True)
class _InBin:
    """Low bits of one window's magnitudes that fall into the threshold's bin: values and counts.

    In the narrowest types: one of these is held for every window of a tensor.
    """

    low: npt.NDArray[np.uint16]
    counts: npt.NDArray[np.uint32]
    nbytes: int


def trim_rules(
    expert: Checkpoint,
    base: Checkpoint,
    stats: ExpertStats,
    densities: Mapping[str, float],
    *,
    progress: Callable[[int], None] | None = None,
) -> dict[str, TrimRule]:
    """The rule that keeps exactly int(density·N) largest |δ|, ties by lowest index.

    `densities`: tensor name to density; tensors of density 1 or more need no rule and get none.
    Raises OperatorError where that number is 0.
    """
    by_name = {t.tensor: t for t in stats.tensors}
    with PairReader(expert, base) as pair:
        rules = {
            tensor: _rule(pair, by_name[tensor], density, expert.name, progress)
            for tensor, density in densities.items()
            if density < 1
        }
        pair.verify_unchanged()
    return rules


def _rule(
    pair: PairReader,
    stats: TensorStats,
    density: float,
    expert: str,
    progress: Callable[[int], None] | None,
) -> TrimRule:
    keep = int(density * stats.numel)
    if keep <= 0:
        raise OperatorError(
            "A density keeps nothing of a tensor",
            where=f"{expert}, tensor {stats.tensor}",
            expected=f"at least 1 of {stats.numel} elements",
            found=f"density {density}",
            next_step="raise the density, or give the tensor density 1 by a filter",
        )
    if keep >= stats.nonzero:  # the ties at the cut are zeros: which of them is kept is moot
        return TrimRule(0, 0)
    bin_, above = _from_top(stats.hist_bins.astype(np.int64), stats.hist_counts, keep)
    windows = []
    for found in pair.map(stats.tensor, lambda w: _in_bin(w, bin_)):
        windows.append(found)
        if progress:
            progress(found.nbytes)
    totals = np.zeros(_LOW + 1, dtype=np.int64)
    for w in windows:
        totals[w.low] += w.counts
    values = np.flatnonzero(totals)
    low, above_low = _from_top(values, totals[values], keep - above)
    bits = (bin_ << HIST_SHIFT) | low
    ties = keep - above - above_low
    for number, w in enumerate(windows):
        here = int(w.counts[w.low == low].sum())
        if ties <= here:
            window = pair.window(stats.tensor, number)
            equal = np.flatnonzero(_bits(window) == bits)
            return TrimRule(bits, window.start_elem + int(equal[ties - 1]) + 1)
        ties -= here
    raise AssertionError("the histogram counted more elements than the tensor has")


def _from_top(
    values: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], keep: int
) -> tuple[int, int]:
    """The value where counting down from the largest reaches `keep`, and how many lie above."""
    cumulative = np.cumsum(counts[::-1])
    at = int(np.searchsorted(cumulative, keep))
    return int(values[::-1][at]), int(cumulative[at] - counts[::-1][at])


def _bits(window: DeltaWindow) -> npt.NDArray[np.uint32]:
    return np.abs(window.values).view(np.uint32)


def _in_bin(window: DeltaWindow, bin_: int) -> _InBin:
    bits = _bits(window)
    low, counts = np.unique(bits[(bits >> HIST_SHIFT) == bin_] & _LOW, return_counts=True)
    return _InBin(low.astype(np.uint16), counts.astype(np.uint32), len(window.expert_raw))
