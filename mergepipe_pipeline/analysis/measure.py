"""Runs an operator's measures over whole tensors: sums and order statistics, window by window.

Reads every expert of a tensor once or twice per step and holds a few windows. The operator says
what a number means; `facts` stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from mergepipe_pipeline.analysis.order import Histogram, bits_at, keep_largest
from mergepipe_pipeline.analysis.stream import GroupWindow, WindowReader
from mergepipe_pipeline.arrays import U32Array
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import TensorTask
from mergepipe_pipeline.domain.segments import KnownSegments
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.operators import Window
from mergepipe_pipeline.operators.steps.tensor_measures import Largest, Measure, Quantiles, Sums

T = TypeVar("T")


@dataclass(frozen=True)
class MeasuredTensor:
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
    tensors: Sequence[MeasuredTensor],
    step: Measure,
    progress: Callable[[int], None] | None = None,
    known: KnownSegments | None = None,
) -> list[tuple[float, ...]]:
    """The numbers of one step for each tensor. Raises CheckpointChangedError.

    Checkpoints' bytes are verified against `known` segments, else CorruptionError.
    """
    with WindowReader(checkpoints, known) as reader:
        numbers = [_measure(reader, tensor, step, progress) for tensor in tensors]
        reader.verify_unchanged()
    return numbers


def _measure(
    reader: WindowReader,
    tensor: MeasuredTensor,
    step: Measure,
    progress: Callable[[int], None] | None,
) -> tuple[float, ...]:
    if isinstance(step, Sums):
        total: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None
        for part in _windows(reader, tensor, lambda w: step.of(w).double().numpy(), progress):
            total = part.copy() if total is None else total + part
        return tuple(total.tolist()) if total is not None else ()
    scores = _Scores(reader, tensor, step, progress)
    histogram = Histogram.of(scores)
    if isinstance(step, Quantiles):
        bits = [bits_at(scores, histogram, rank) for rank in step.ranks(tensor.numel)]
        return tuple(float(np.uint32(b).view(np.float32)) for b in bits)
    nonzero = sum(scores.map(lambda _, bits: int(np.count_nonzero(bits))))
    keep = step.count(tensor.numel, nonzero, tensor.task.facts, dict(tensor.task.params))
    if keep >= nonzero:
        return (0.0, 0.0)
    rule = keep_largest(scores, histogram, keep)
    return rule.threshold, float(rule.tie_stop_elem)


@dataclass(frozen=True)
class _Scores:
    reader: WindowReader
    tensor: MeasuredTensor
    step: Quantiles | Largest
    progress: Callable[[int], None] | None

    def map(self, work: Callable[[int, U32Array], T], only: int | None = None) -> Iterator[T]:
        def of(window: Window) -> T:
            score = self.step.score(window).contiguous().view(torch.int32).numpy()
            return work(window.start_elem, score.view(np.uint32))

        return _windows(self.reader, self.tensor, of, self.progress, only)


def _windows(
    reader: WindowReader,
    tensor: MeasuredTensor,
    work: Callable[[Window], T],
    progress: Callable[[int], None] | None,
    only: int | None = None,
) -> Iterator[T]:
    def run(w: GroupWindow) -> tuple[T, int]:
        return work(Window(w.base, w.rows, tensor.task, w.start_elem)), w.nbytes

    for of_window, nbytes in reader.groups(
        tensor.experts,
        tensor.base,
        tensor.numel,
        run,
        as_delta=tensor.as_delta,
        row_elems=tensor.row_elems,
        only=only,
    ):
        if progress:
            progress(nbytes)
        yield of_window
