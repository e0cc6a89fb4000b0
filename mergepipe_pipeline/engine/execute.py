"""Runs layers: read, merge, hash and write, each window once, several windows at a time.

Workers each read and merge one window, single-threaded, so that reading overlaps arithmetic and a
busy machine costs no more than its share; this thread hashes and writes in order. The order of
arithmetic is fixed per element, so neither windows nor threads change a bit. No retry and no cache
here: the caller knows about actions and staging.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.engine.windows import EngineOptions, cut
from mergepipe_pipeline.engine.workspace import Desk
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.operators.registry import Operator, Window
from mergepipe_pipeline.spec.blocks import clip, total_elems
from mergepipe_pipeline.spec.plan import LayerTask, MergePlan, TensorTask
from mergepipe_pipeline.storage.writer import ShardWriter
from mergepipe_pipeline.tensors.low_rank import LowRankUpdate
from mergepipe_pipeline.tensors.rows import BaseRow, ExpertRow
from mergepipe_pipeline.tensors.stored import Bytes, torch_dtype

#: Called with the output bytes that a finished window wrote.
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What running a layer gave: the object's digest and size in bytes, and the bytes it cost.

    `tensors` are (name, SHA-256 of the file up to the end of that tensor) in file order.
    """

    sha256: str
    nbytes: int
    tensors: tuple[tuple[str, str], ...]
    expert_bytes_read: int
    base_bytes_read: int
    wall_s: float


class LayerRunner:
    """Runs the layers of one plan with shared readers, threads and buffers; a context manager."""

    def __init__(self, plan: MergePlan, options: EngineOptions) -> None:
        self._options = options
        self._sources = SourcePool(plan)
        self._desks = [Desk() for _ in range(options.slots)]
        self._stack = ExitStack()

    def __enter__(self) -> LayerRunner:
        # Windows are the parallelism; threads inside an operation would wait for each other.
        self._stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        self._stack.enter_context(self._sources)
        self._pool = self._stack.enter_context(ThreadPoolExecutor(self._options.threads))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(self, layer: LayerTask, path: Path, progress: Progress | None = None) -> LayerResult:
        """Write the merged layer to `path` (a new file in staging) and say what it cost.

        Raises CheckpointChangedError if an input changed meanwhile, StorageFullError on a full
        disk, CorruptionError if the bytes read are not the bytes planned.
        """
        started = time.monotonic()
        expert_before, base_before = self._sources.bytes_read()
        described = [(t.name, t.out_dtype, t.shape) for t in layer.tasks]
        with ShardWriter(path, described, {"format": "pt"}) as writer:
            tasks = {t.name: t for t in layer.tasks}
            in_order = [tasks[name] for name in writer.order]
            for chunk in self._merged(self._windows(in_order)):
                writer.write(chunk.data)
                if progress:
                    progress(len(chunk))
            sha256, nbytes = writer.finish()
            prefixes = writer.prefix_digests
        self._sources.verify_unchanged()
        expert_after, base_after = self._sources.bytes_read()
        if expert_after - expert_before != layer.expert_bytes_planned:
            raise CorruptionError(
                "A layer did not read what its plan says",
                where=layer.name,
                expected=f"{layer.expert_bytes_planned} expert bytes",
                found=str(expert_after - expert_before),
                next_step="this is a defect of mergepipe: please report it with the plan",
            )
        return LayerResult(
            sha256,
            nbytes,
            prefixes,
            expert_after - expert_before,
            base_after - base_before,
            time.monotonic() - started,
        )

    def _windows(self, tasks: list[TensorTask]) -> Iterator[_Window]:
        number = 0
        for task in tasks:
            job = _Job(task, self._sources)
            numel = prod(task.shape)
            n = self._options.window_for(len(task.experts), max(job.sizes), job.row_elems)
            for start, stop in cut(numel, min(numel, n)) if numel else ():
                yield _Window(job, self._desks[number % len(self._desks)], start, stop)
                number += 1

    def _merged(self, windows: Iterator[_Window]) -> Iterator[Bytes]:
        """Output bytes of windows in order, while the next ones are being worked on.

        A window's desk is cleared only after the caller came back for the next one.
        """
        pending: deque[Future[Bytes]] = deque()
        try:
            for window in windows:
                pending.append(self._pool.submit(window.run))
                if len(pending) == len(self._desks):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


class _Job:
    """One output tensor: what all its windows share."""

    def __init__(self, task: TensorTask, sources: SourcePool) -> None:
        self.task, self.sources = task, sources
        self.operator: Operator | None = OPERATORS.get(task.operator)
        #: Bytes per stored element of each expert, and of the base at the end.
        self.sizes = [itemsize(e.view.dtype) for e in task.experts]
        self.sizes += [itemsize(task.base.view.dtype)] if task.base else []
        self.updates = [
            LowRankUpdate(sources.expert, e.view.low_rank) if e.view.low_rank else None
            for e in task.experts
        ]
        low_rank = task.base and task.base.view.low_rank
        self.base_update = LowRankUpdate(sources.base, low_rank) if low_rank else None

    @property
    def row_elems(self) -> int:
        """Elements that must stay together in a window."""
        whole_rows = self.operator is not None and self.operator.schema.scope == "row"
        return max(1, self.task.shape[-1]) if whole_rows and self.task.shape else 1

    @property
    def as_delta(self) -> bool:
        """Whether the operator works on δ, not on T."""
        space = self.operator.schema.space if self.operator else "delta"
        return space == "delta" or (space == "delta_if_base" and self.task.base is not None)

    @property
    def is_copy(self) -> bool:
        """Nothing of any expert is read in the whole tensor: the base's values are the result."""
        if self.operator is None:
            return True
        return self.as_delta and not any(e.read for e in self.task.experts)

    def needs_base(self, start: int, stop: int) -> bool:
        """Whether the base's elements [start, stop) take part in the result."""
        if self.operator is None or self.as_delta or self.operator.schema.base != "none":
            return True
        return any(
            not e.view.stands_alone or total_elems(clip(e.read, start, stop)) < stop - start
            for e in self.task.experts
        )


class _Window:
    """One run of elements of one output tensor, from bytes to bytes."""

    def __init__(self, job: _Job, desk: Desk, start: int, stop: int) -> None:
        self._job, self._desk = job, desk
        self._start, self._stop = start, stop
        self._experts: list[ExpertRow] = []
        self._base: BaseRow | None = None

    def run(self) -> Bytes:
        """Read what the plan allows, merge it, and give the window's output bytes."""
        self._fetch()
        return self._merge()

    def _fetch(self) -> None:
        job, n = self._job, self._stop - self._start
        self._desk.clear(n * sum(job.sizes), len(job.sizes))
        base = job.task.base
        if base and job.needs_base(self._start, self._stop):
            buffer = self._desk.take(n * job.sizes[-1])
            self._base = BaseRow(job.sources.base, base.view, buffer, job.base_update)
            self._base.fetch(self._start, self._stop)
        for e, size, update in zip(job.task.experts, job.sizes, job.updates, strict=False):
            buffer = self._desk.take(n * size)
            row = ExpertRow(job.sources.expert, e.view, e.read, buffer, update)
            row.fetch(self._start, self._stop)
            self._experts.append(row)

    def _merge(self) -> Bytes:
        job, task = self._job, self._job.task
        if job.is_copy:
            return self._copy()
        assert job.operator is not None
        base = self._base.values() if self._base else None
        rows = self._desk.rows(len(self._experts), self._stop - self._start)
        for row, expert in zip(rows, self._experts, strict=True):
            (expert.delta if job.as_delta else expert.value)(row, base)
        merged = job.operator.apply(Window(base, rows, task, self._start))
        return to_bytes(merged, task.out_dtype)

    def _copy(self) -> Bytes:
        task = self._job.task
        assert self._base is not None
        assert task.base is not None
        if task.base.view.dtype == task.out_dtype and not self._job.base_update:
            return self._base.raw.copy()
        return to_bytes(self._base.values(), task.out_dtype)


def to_bytes(values: torch.Tensor, dtype: str) -> Bytes:
    """The bytes of [n] float32 values cast once, to nearest even, to `dtype`."""
    cast = values.to(torch_dtype(dtype))
    if cast is values:  # the caller reuses its rows while these bytes are still being written
        cast = values.clone()
    out: Bytes = cast.view(torch.uint8).numpy()
    return out
