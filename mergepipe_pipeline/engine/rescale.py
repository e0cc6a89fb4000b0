"""Finds the factors that give random drops their norm back, where a plan leaves them open.

By a pass over a tensor right before its merge, which then finds the same bytes in the page cache.
Only sums are kept. Reads through the same gate as the merge, and is not counted again. The merge
compares every byte with what was analysed; here the norm of the whole delta is compared, which
costs less, and all that a byte read wrong could change here is a norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.concurrency.free_list import FreeList
from mergepipe_pipeline.concurrency.prefetch import prefetch
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine.buffers import BufferPool
from mergepipe_pipeline.engine.jobs import Job
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.engine.windows import cut
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.operators.kernels.kept_l1 import (
    CHUNK_ELEMS,
    kept_l1,
    kept_l1_bfloat16,
    l1_scale,
)
from mergepipe_pipeline.operators.steps.random import keep_below, stream_key
from mergepipe_pipeline.spec.plan import ExpertInput, TensorTask
from mergepipe_pipeline.tensors.rows import BaseRow, ExpertRow
from mergepipe_pipeline.tensors.stored import Bytes

#: Elements of one expert read together: a multiple of CHUNK_ELEMS, so no sum depends on it.
_WINDOW_ELEMS = 1 << 18
#: Norms of equal deltas are as good as equal: the sums have one order, whoever takes them.
_NORM_ERROR = 1e-12
#: Tensors whose factors are found before they are merged: their bytes wait in the page cache.
_AHEAD = 2

Sums = npt.NDArray[np.float64]


class RescalePrepass:
    """Finds the open factors of one plan's tasks, a few windows at once; a context manager.

    It has threads of its own, so that it reads on while the tensors before are merged.
    """

    def __init__(self, sources: SourcePool, threads: int) -> None:
        self._sources = sources
        self._threads, self._workers = threads, Workers(threads)
        self._buffers = FreeList(BufferPool)

    def __enter__(self) -> RescalePrepass:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()

    def rescaled_ahead(self, tasks: Iterable[TensorTask]) -> Iterator[TensorTask]:
        """The tasks in order with every factor known; the next ones are worked on meanwhile."""
        for rescaled in prefetch((partial(self.rescaled, task) for task in tasks), _AHEAD):
            yield rescaled()

    def rescaled(self, task: TensorTask) -> TensorTask:
        """The task with every factor known; the same task if none was open."""
        if all(e.l1 is None for e in task.experts):
            return task
        return replace(
            task,
            experts=tuple(
                e if e.l1 is None else replace(e, scale=l1_scale(e.l1, kept), l1=None)
                for e, kept in zip(task.experts, self._kept(task), strict=True)
            ),
        )

    def _kept(self, task: TensorTask) -> list[float]:
        """Per expert, the L1 norm of what its drop leaves; 0 where it is not needed."""
        job = Job(task, self._sources, before=True)
        told = [_is_told_by_norm(job, number) for number in range(len(task.experts))]
        norms = self._norms(job, told)
        for number, (_, whole) in enumerate(norms):
            if told[number] and _is_other_norm(task.experts[number], whole):
                # The second reading compares every byte, so that the error names the elements.
                self._norms(Job(task, self._sources, before=True), [False] * len(norms))
                _refuse_other_norm(job, number, whole)
        return [kept for kept, _ in norms]

    def _norms(self, job: Job, told: Sequence[bool]) -> list[tuple[float, float]]:
        """Per expert, the L1 norms of what its drop leaves and of its whole delta."""
        parts: list[list[Sums]] = [[] for _ in told]
        windows = (
            _PrepassWindow(job, told, start, stop)
            for start, stop in cut(prod(job.task.shape), _WINDOW_ELEMS)
        )
        for found in self._workers.map(self._run_window, windows, depth=self._threads):
            for part, sums in zip(parts, found, strict=True):
                part.append(sums)
        job.finish()
        return [(_total(part, row=0), _total(part, row=1)) for part in parts]

    def _run_window(self, window: _PrepassWindow) -> list[Sums]:
        with self._buffers.lent() as buffers:
            return window.run(buffers)


class _PrepassWindow:
    """One run of elements of all experts of a task; `told`: whose norm is compared."""

    def __init__(self, job: Job, told: Sequence[bool], start_elem: int, stop_elem: int) -> None:
        self._told = told
        self._job, self._task, self._sources = job, job.task, job.sources
        self._start, self._stop = start_elem, stop_elem
        self._n = stop_elem - start_elem

    def run(self, buffers: BufferPool) -> list[Sums]:
        """Per expert, the sums of its chunks."""
        task, n = self._task, self._n
        assert task.base is not None
        sizes = [itemsize(v.dtype) for v in (task.base.view, *(e.view for e in task.experts))]
        # One expert after the other in the same room: only the base must stay.
        buffers.clear(n * (sizes[0] + max(sizes)), 2)
        job, buffer = self._job, buffers.take(n * sizes[0])
        verify = None if all(self._told) else job.verify_base
        base = BaseRow(self._sources.base_before, task.base.view, buffer, job.base_update, verify)
        base.fetch(self._start, self._stop)
        room = buffers.take(n * max(sizes))
        return [
            self._kept(number, base, room[: n * size], buffers)
            for number, size in enumerate(sizes[1:])
        ]

    def _kept(self, number: int, base: BaseRow, room: Bytes, buffers: BufferPool) -> Sums:
        job, task, n = self._job, self._task, self._n
        e, update = task.experts[number], job.updates[number]
        verify = None if self._told[number] else job.verify[number]
        sums = np.zeros((2, -(-n // CHUNK_ELEMS)))
        drawn_below = _drawn_below(e)
        if e.l1 is None or not drawn_below:
            return sums
        # Here and at once: the room is another expert's next.
        packed = job.packed[number]
        fetch = packed.fetch if packed else None
        row = ExpertRow(self._sources.expert_before, e.view, e.read, room, update, verify, fetch)
        row.fetch(self._start, self._stop, base.raw)
        key = stream_key(task.seed, e.position, task.name)
        which = (key, self._start, np.uint32(drawn_below - 1), sums)
        if base.bits is not None and (bits := row.bits(base.bits)) is not None:
            kept_l1_bfloat16(bits, base.bits, *which)
            return sums
        padded = buffers.rows(1, sums.shape[1] * CHUNK_ELEMS)[0]
        padded[n:] = 0
        row.delta(padded[:n], base.values())
        kept_l1(padded.numpy(), *which)
        return sums


def _drawn_below(e: ExpertInput) -> int:
    return keep_below(float(dict(e.params)["density"]))


def _is_told_by_norm(job: Job, number: int) -> bool:
    """Whether a wrong reading of an expert shows in its delta's norm.

    Adapters' deltas are rounded in windows, and what is not finite has no norm.
    """
    e, base = job.task.experts[number], job.task.base
    is_read = e.l1 is not None and math.isfinite(e.l1) and _drawn_below(e) > 0
    is_stored = e.view.low_rank is None and base is not None and base.view.low_rank is None
    return is_read and is_stored and job.verify[number] is not None


def _total(parts: Sequence[Sums], *, row: int) -> float:
    return math.fsum(x for sums in parts for x in sums[row].tolist())


def _is_other_norm(e: ExpertInput, whole: float) -> bool:
    return e.l1 is not None and abs(whole - e.l1) > _NORM_ERROR * e.l1


def _refuse_other_norm(job: Job, number: int, whole: float) -> NoReturn:
    e = job.task.experts[number]
    raise CorruptionError(
        "An input's bytes are not those that were analysed",
        where=f"tensor {job.task.name}, expert {e.position} of the recipe, or its base",
        expected=f"a delta with an L1 norm of {e.l1!r}",
        found=f"{whole!r}, in files of the same size and time",
        next_step="copy the files again; if a change is meant, `touch` them, so that they are "
        "analysed anew",
    )
