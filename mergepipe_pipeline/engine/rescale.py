"""Finds the factors that give random drops their norm back, where a plan leaves them open.

It passes over a tensor right before its merge, and holds the bytes for the merge as far as memory
goes. Only sums are kept. It reads through the same gate as the merge, and is not counted again. The
merge compares every byte with what was analysed; here the norm of the whole delta is compared,
which costs less: all that a wrong byte could change here is a norm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import NoReturn

import numpy as np

from mergepipe_pipeline.arrays import F64Array, U8Array
from mergepipe_pipeline.concurrency.workers import FreeList, TaskQueue, Workers
from mergepipe_pipeline.domain.blocks import clip
from mergepipe_pipeline.domain.plan import ExpertInput, TensorTask
from mergepipe_pipeline.engine.jobs import Job
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.engine.window import BufferPool, cut
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.operators.kernels.kept_l1 import (
    CHUNK_ELEMS,
    kept_l1,
    kept_l1_bfloat16,
    l1_scale,
)
from mergepipe_pipeline.operators.steps.random import keep_below, stream_key
from mergepipe_pipeline.packs.rows import BaseRow, ExpertRow
from mergepipe_pipeline.storage.held import PIECE_NBYTES
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.storage.read_batch import ReadBatch

#: Elements of one expert read together: a multiple of CHUNK_ELEMS, so no sum depends on it. Half
#: as many take a tenth longer (dare_ties of 5 and 20 experts of 0.6B), twice as many no less.
_WINDOW_ELEMS = 1 << 19
#: Norms of equal deltas are as good as equal: the sums have one order, whoever takes them.
_NORM_ERROR = 1e-12
#: Tensors whose factors are found at once: windows of one run out before the next one's begin.
_AT_ONCE = 3

Sums = F64Array


class RescalePrepass:
    """Finds the open factors of one plan's tasks, a few windows at once; a context manager.

    It has threads of its own, so that it reads on while the tensors before are merged.
    """

    def __init__(self, sources: SourcePool, threads: int) -> None:
        self._sources = sources
        self._threads, self._workers, self._tasks = threads, Workers(threads), Workers(_AT_ONCE)
        self._buffers = FreeList(BufferPool)

    def __enter__(self) -> RescalePrepass:
        return self

    def __exit__(self, *_: object) -> None:
        self._tasks.close()
        self._workers.close()

    def rescaled_ahead(self, tasks: Iterable[TensorTask]) -> Generator[TensorTask]:
        """The tasks in order with every factor known; the next ones are worked on meanwhile.

        So many that their bytes can be held until they are merged, and at least one.
        """
        queue: TaskQueue[TensorTask] = self._tasks.queue()
        sizes: deque[int] = deque()  # bytes to hold of each task in the queue
        todo = deque(tasks)

        def begin() -> None:
            while todo:
                nbytes = _held_nbytes(todo[0])
                if sizes and sum(sizes) + nbytes > self._sources.held_nbytes:
                    break
                sizes.append(nbytes)
                queue.put(partial(self.rescaled, todo.popleft()))

        try:
            begin()
            while sizes:
                task = queue.take()
                sizes.popleft()
                begin()  # the caller comes back when most of this task is merged
                yield task
        finally:
            queue.cancel()

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
        drawn = _drawn(job)
        norms = self._norms(job, drawn)
        for d, (_, whole) in zip(drawn, norms, strict=True):
            if d.compares_norm and _is_other_norm(d.expert, whole):
                # The second reading compares every byte, so that the error names the elements.
                again = [replace(d, compares_norm=False) for d in drawn]
                self._norms(Job(task, self._sources, before=True), again)
                _refuse_other_norm(job, d.expert, whole)
        kept = {d.number: norm for d, (norm, _) in zip(drawn, norms, strict=True)}
        return [kept.get(number, 0.0) for number in range(len(task.experts))]

    def _norms(self, job: Job, drawn: Sequence[_Drawn]) -> list[tuple[float, float]]:
        """Return the L1 norms of what each expert's drop leaves and of its whole delta."""
        windows = (
            _PrepassWindow(job, drawn, start, stop)
            for start, stop in cut(prod(job.task.shape), _WINDOW_ELEMS)
        )
        sums_by_window = list(self._workers.map(self._run_window, windows, depth=self._threads))
        job.finish()

        def norm(i: int, row: int) -> float:
            return math.fsum(chain.from_iterable(sums[i, row].tolist() for sums in sums_by_window))

        return [(norm(i, 0), norm(i, 1)) for i in range(len(drawn))]

    def _run_window(self, window: _PrepassWindow) -> Sums:
        with self._buffers.lent() as buffers:
            return window.run(buffers)


def _held_nbytes(task: TensorTask) -> int:
    """Memory for the bytes that are read for a task's factors: some even for a short one."""
    views = [e.view for e in task.experts] + ([task.base.view] if task.base else [])
    is_open = any(e.l1 is not None for e in task.experts)
    return sum(max(PIECE_NBYTES, view.nbytes) if is_open else 1 for view in views)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """An expert whose factor is open: its number in the task, its stream and the last one kept.

    `compares_norm`: its norm is compared, and not its bytes.
    """

    number: int
    expert: ExpertInput
    key: np.uint64
    last: np.uint32
    compares_norm: bool


def _drawn(job: Job) -> list[_Drawn]:
    """The experts of a job whose factors are open and whose drops leave anything."""
    seed, name = job.task.seed, job.task.name
    drawn = []
    for number, e in enumerate(job.task.experts):
        keep_bound = 0 if e.l1 is None else keep_below(float(dict(e.params)["density"]))
        if keep_bound:
            key, last = stream_key(seed, e.position, name), np.uint32(keep_bound - 1)
            drawn.append(_Drawn(number, e, key, last, _can_compare_norm(job, number)))
    return drawn


class _PrepassWindow:
    """One run of elements of all drawn experts of a task."""

    def __init__(self, job: Job, drawn: Sequence[_Drawn], start_elem: int, stop_elem: int) -> None:
        self._job, self._task, self._sources = job, job.task, job.sources
        self._drawn = drawn
        self._start, self._stop = start_elem, stop_elem
        self._n = stop_elem - start_elem

    def run(self, buffers: BufferPool) -> Sums:
        """Return the sums of each expert's chunks: [experts, 2, chunks]."""
        job, task, n = self._job, self._task, self._n
        assert task.base is not None
        sums = np.zeros((len(self._drawn), 2, -(-n // CHUNK_ELEMS)))
        # One expert after the other in the same buffer, if it is not held: only the base must stay.
        most = max((job.sizes[d.number] for d in self._drawn), default=0)
        buffers.clear(n * (job.sizes[-1] + most), 2)
        buffer = buffers.take(n * job.sizes[-1])
        verify = None if all(d.compares_norm for d in self._drawn) else job.verify_base
        base = BaseRow(self._sources.base_before, task.base.view, buffer, job.base_update, verify)
        both = zip(self._drawn, sums, strict=True)
        with ReadBatch() as batch:
            base.fetch(self._start, self._stop, batch)
            rest = [(d, into) for d, into in both if not self._add_up_held(d, base, into, batch)]
        raw = buffers.take(n * most)
        for d, into in rest:
            self._add_up(d, base, raw[: n * job.sizes[d.number]], buffers, into)
        return sums

    def _add_up_held(self, d: _Drawn, base: BaseRow, sums: Sums, batch: ReadBatch) -> bool:
        """Add up stored bfloat16 where it is held, when the batch runs; False if that is not so."""
        start, stop, view, base_bits = self._start, self._stop, d.expert.view, base.bits
        is_whole = tuple(clip(d.expert.read, start, stop)) == ((start, stop),)
        is_stored = view.dtype == "BF16" and view.is_plain and view.stored[0].codes is None
        if base_bits is None or not (d.compares_norm and is_whole and is_stored):
            return False

        def use(raw: memoryview) -> None:
            bits = np.frombuffer(raw, np.uint16)
            bits = bits if bits.flags.aligned else bits.copy()
            kept_l1_bfloat16(bits, base_bits, d.key, start, d.last, sums)

        part = view.stored[0]
        reader = self._sources.expert_before(part.source)
        return reader.lend(batch, part.entry, start, stop, use)

    def _add_up(
        self, d: _Drawn, base: BaseRow, raw: U8Array, buffers: BufferPool, sums: Sums
    ) -> None:
        job, n = self._job, self._n
        verify, update = None if d.compares_norm else job.verify[d.number], job.updates[d.number]
        # Here and at once: the buffer is another expert's next.
        pack = job.packed[d.number]
        packed = pack.fetch(self._start, self._stop, PageBuffer()) if pack else ()
        row = ExpertRow(
            self._sources.expert_before, d.expert.view, d.expert.read, raw, update, verify
        )
        with ReadBatch() as batch:
            row.fetch(self._start, self._stop, packed, base.raw, batch)
        which = (d.key, self._start, d.last, sums)
        if base.bits is not None and (bits := row.bits(base.bits)) is not None:
            kept_l1_bfloat16(bits, base.bits, *which)
            return
        padded = buffers.rows(1, sums.shape[1] * CHUNK_ELEMS)[0]
        padded[n:] = 0
        row.delta(padded[:n], base.values())
        kept_l1(padded.numpy(), *which)


def _can_compare_norm(job: Job, number: int) -> bool:
    """Whether a wrong reading of an expert shows in its delta's norm.

    Adapters' deltas are rounded in windows, and what is not finite has no norm.
    """
    e, base = job.task.experts[number], job.task.base
    is_read = e.l1 is not None and math.isfinite(e.l1)
    is_stored = e.view.low_rank is None and base is not None and base.view.low_rank is None
    return is_read and is_stored and job.verify[number] is not None


def _is_other_norm(e: ExpertInput, whole: float) -> bool:
    # NaN is no norm, and nothing is larger than it is.
    return e.l1 is not None and not abs(whole - e.l1) <= _NORM_ERROR * e.l1


def _refuse_other_norm(job: Job, e: ExpertInput, whole: float) -> NoReturn:
    raise CorruptionError(
        "An input's bytes are not those that were analysed",
        where=f"tensor {job.task.name}, expert {e.position} of the recipe, or its base",
        expected=f"a delta with an L1 norm of {e.l1!r}",
        found=f"{whole!r}, in files of the same size and time",
        next_step="copy the files again; if a change is meant, `touch` them, so that they are "
        "analysed anew",
    )
