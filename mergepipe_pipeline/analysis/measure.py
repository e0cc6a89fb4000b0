"""Runs an operator's measures over whole tensors: sums and order statistics, window by window.

Reads every expert of a tensor once or twice per step and holds a few windows. What a number means
is the operator's business; `pipeline.facts` remembers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from mergepipe_pipeline.analysis.order import Histogram, InBin, bits_at, in_bin, keep_largest
from mergepipe_pipeline.analysis.pass_windows import GroupWindow
from mergepipe_pipeline.analysis.stream import WindowReader
from mergepipe_pipeline.arrays import U32Array
from mergepipe_pipeline.operators import Window
from mergepipe_pipeline.operators.steps.tensor_measures import Largest, Measure, Quantiles, Sums
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.plan import TensorTask
from mergepipe_pipeline.spec.segments import KnownSegments
from mergepipe_pipeline.spec.view import TensorView

T = TypeVar("T")


@dataclass(frozen=True)
class Site:
    """One tensor to measure: its task (with the numbers known so far), and its inputs' views.

    Sources of all views index one list of checkpoints.
    """

    task: TensorTask
    base: TensorView | None
    experts: tuple[TensorView, ...]
    as_delta: bool
    row_elems: int

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return int(np.prod(self.task.shape, dtype=np.int64))


def measure(
    checkpoints: Sequence[Checkpoint],
    sites: Sequence[Site],
    step: Measure,
    progress: Callable[[int], None] | None = None,
    known: KnownSegments | None = None,
) -> list[tuple[float, ...]]:
    """The numbers of one step for each site. Raises CheckpointChangedError.

    Checkpoints' bytes are verified against `known` segments, else CorruptionError.
    """
    with WindowReader(checkpoints, known) as reader:
        found = [_measure(reader, site, step, progress) for site in sites]
        reader.verify_unchanged()
    return found


def _measure(
    reader: WindowReader, site: Site, step: Measure, progress: Callable[[int], None] | None
) -> tuple[float, ...]:
    if isinstance(step, Sums):
        total: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None
        for part in _windows(reader, site, lambda w: step.of(w).double().numpy(), progress):
            total = part.copy() if total is None else total + part
        return tuple(total.tolist()) if total is not None else ()
    scores = _Scores(reader, site, step, progress)
    histogram = Histogram.of(scores)
    if isinstance(step, Quantiles):
        bits = [bits_at(scores, histogram, rank) for rank in step.ranks(site.numel)]
        return tuple(float(np.uint32(b).view(np.float32)) for b in bits)
    nonzero = sum(scores.map(lambda _, found: int(np.count_nonzero(found))))
    keep = step.count(site.numel, nonzero, site.task.facts, dict(site.task.params))
    if keep >= nonzero:
        return (0.0, 0.0)
    rule = keep_largest(scores, histogram, keep)
    return (float(np.uint32(rule.threshold_bits).view(np.float32)), float(rule.tie_stop_elem))


@dataclass(frozen=True)
class _Scores:
    reader: WindowReader
    site: Site
    step: Quantiles | Largest
    progress: Callable[[int], None] | None

    def map(self, work: Callable[[int, U32Array], T], only: int | None = None) -> Iterator[T]:
        def of(window: Window) -> T:
            score = self.step.score(window).contiguous().view(torch.int32).numpy()
            return work(window.start_elem, score.view(np.uint32))

        return _windows(self.reader, self.site, of, self.progress, only)

    def in_bin(self, bin_: int) -> Iterator[InBin]:
        return self.map(lambda _, bits: in_bin(bits, bin_))


def _windows(
    reader: WindowReader,
    site: Site,
    work: Callable[[Window], T],
    progress: Callable[[int], None] | None,
    only: int | None = None,
) -> Iterator[T]:
    def run(w: GroupWindow) -> tuple[T, int]:
        return work(Window(w.base, w.rows, site.task, w.start_elem)), w.nbytes

    for found, nbytes in reader.groups(
        site.experts,
        site.base,
        site.numel,
        run,
        as_delta=site.as_delta,
        row_elems=site.row_elems,
        only=only,
    ):
        if progress:
            progress(nbytes)
        yield found
