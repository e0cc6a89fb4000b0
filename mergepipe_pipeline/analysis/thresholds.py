"""Exact trim thresholds of experts' deltas: which elements a sparsifier by magnitude keeps.

From a pass over tensors whose magnitudes are not listed (else: `order.open_rule`). The catalog's
histogram of |δ| saves the first pass. TIES: https://arxiv.org/abs/2306.01708.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import numpy as np

from mergepipe_pipeline.analysis.order import Histogram, keep_largest, plain_rule
from mergepipe_pipeline.analysis.stream import DeltaWindow, WindowReader
from mergepipe_pipeline.arrays import U32Array
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.domain.segments import KnownSegments
from mergepipe_pipeline.domain.stats import TensorStats
from mergepipe_pipeline.domain.view import TensorView, moved

Pair = tuple[str, str]
T = TypeVar("T")


def trim_rules(
    expert: Model,
    base: Model,
    keeps: Mapping[Pair, tuple[TensorStats, int]],
    *,
    known: KnownSegments | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[Pair, TrimRule]:
    """The rules that keep exactly so many of the largest |δ|, ties by lowest index.

    `keeps`: (expert's tensor, base's tensor) to its statistics and the number of elements to keep.
    `known`: segments of the expert's checkpoints and then the base's, which verify what is read.
    """
    rules = {}
    with WindowReader((*expert.checkpoints, *base.checkpoints), known) as reader:
        for pair, (of_pair, keep) in keeps.items():
            if rule := plain_rule(of_pair, keep):
                rules[pair] = rule
                continue
            base_view = moved(base.views[pair[1]], len(expert.checkpoints))
            scores = _Magnitudes(reader, expert.views[pair[0]], base_view, progress)
            histogram = Histogram(of_pair.hist_bins.astype(np.int64), of_pair.hist_counts)
            rules[pair] = keep_largest(scores, histogram, keep)
        reader.verify_unchanged()
    return rules


class _Magnitudes:
    """|δ| of one tensor as scores."""

    def __init__(
        self,
        reader: WindowReader,
        expert: TensorView,
        base: TensorView,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._reader, self._expert, self._base, self._progress = reader, expert, base, progress

    def map(self, work: Callable[[int, U32Array], T], only: int | None = None) -> Iterator[T]:
        def of(window: DeltaWindow) -> tuple[T, int]:
            bits = np.abs(window.values, out=window.values).view(np.uint32)
            return work(window.start_elem, bits), len(window.expert_raw)

        for of_window, nbytes in self._reader.deltas(self._expert, self._base, of, only=only):
            if self._progress:
                self._progress(nbytes)
            yield of_window
