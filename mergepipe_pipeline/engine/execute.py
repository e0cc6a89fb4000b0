"""Runs layers: read, merge, hash and write, each window once, in three overlapping steps.

Reader threads fetch the next windows while this thread computes and another one writes the last.
The order of arithmetic is fixed per element, so neither windows nor threads change a bit. No retry
and no cache here: the caller knows about actions and staging.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine.delta import BaseRow, Bytes, FullCheckpointRow, to_bytes
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.engine.windows import SLOTS, EngineOptions, cut
from mergepipe_pipeline.engine.workspace import Rows, Slab
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.operators.registry import Operator, Window
from mergepipe_pipeline.spec.blocks import total_elems
from mergepipe_pipeline.spec.plan import LayerTask, MergePlan, TensorTask
from mergepipe_pipeline.storage.writer import ShardWriter

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
        self._slabs = [Slab() for _ in range(SLOTS)]
        self._rows = Rows()
        self._stack = ExitStack()

    def __enter__(self) -> LayerRunner:
        torch.set_num_threads(self._options.threads)
        self._stack.enter_context(self._sources)
        self._read_pool = self._stack.enter_context(ThreadPoolExecutor(self._options.threads))
        self._write_pool = self._stack.enter_context(ThreadPoolExecutor(1))
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
            writes: deque[Future[None]] = deque()
            for window in self._read_ahead(self._windows(in_order)):
                chunk = window.merge(self._rows)
                writes.append(self._write_pool.submit(writer.write, chunk.data))
                if len(writes) >= SLOTS:
                    writes.popleft().result()
                if progress:
                    progress(len(chunk))
            for write in writes:
                write.result()
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
            sizes = [itemsize(e.tensor.dtype) for e in task.experts]
            sizes += [itemsize(task.base.tensor.dtype)] if task.base else []
            numel = (task.base.tensor if task.base else task.experts[0].tensor).numel
            n = min(numel, self._options.window_for(len(task.experts), max(sizes)))
            for start, stop in cut(numel, n) if n else ():
                slab = self._slabs[number % SLOTS]
                yield _Window(task, self._sources, slab, start, stop, sizes)
                number += 1

    def _read_ahead(self, windows: Iterator[_Window]) -> Iterator[_Window]:
        """Windows in order, each fetched; SLOTS - 1 more are being fetched meanwhile.

        A window's slab is carved again only after the caller came back for the next one.
        """
        pending: deque[tuple[_Window, Future[None]]] = deque()
        try:
            for window in windows:
                window.carve()
                pending.append((window, self._read_pool.submit(window.fetch)))
                if len(pending) == SLOTS:
                    ready, fetched = pending.popleft()
                    fetched.result()
                    yield ready
            while pending:
                ready, fetched = pending.popleft()
                fetched.result()
                yield ready
        finally:
            for _, fetched in pending:
                fetched.cancel()


class _Window:
    """One run of elements of one output tensor, from bytes to bytes."""

    def __init__(
        self,
        task: TensorTask,
        sources: SourcePool,
        slab: Slab,
        start: int,
        stop: int,
        sizes: list[int],
    ) -> None:
        self._task, self._sources, self._slab = task, sources, slab
        self._start, self._stop, self._sizes = start, stop, sizes
        self._operator: Operator | None = OPERATORS.get(task.operator)
        self._experts: list[FullCheckpointRow] = []
        self._base: BaseRow | None = None

    def carve(self) -> None:
        """Give every input its buffer; what the slab held before is done with."""
        n = self._stop - self._start
        self._slab.reset(n * sum(self._sizes), len(self._sizes))
        for e, size in zip(self._task.experts, self._sizes, strict=False):
            reader = self._sources.expert(e.source)
            self._experts.append(FullCheckpointRow(reader, e, self._slab.take(n * size)))
        if self._task.base and self._needs_base():
            reader = self._sources.base(self._task.base.source)
            buffer = self._slab.take(n * self._sizes[-1])
            self._base = BaseRow(reader, self._task.base.tensor, buffer)

    def fetch(self) -> None:
        """Read the base and what the plan allows of every expert."""
        if self._base:
            self._base.fetch(self._start, self._stop)
        for row in self._experts:
            row.fetch(self._start, self._stop)

    def merge(self, rows: Rows) -> Bytes:
        """The window's output bytes."""
        task = self._task
        if self._is_copy():
            assert self._base is not None
            same = task.base is not None and task.base.tensor.dtype == task.out_dtype
            return self._base.raw.copy() if same else to_bytes(self._base.values(), task.out_dtype)
        assert self._operator is not None
        space = self._operator.schema.space
        base = self._base.values() if self._base else None
        matrix = rows.take(len(self._experts), self._stop - self._start)
        for row, expert in zip(matrix, self._experts, strict=True):
            expert.fill(row, base, space)
        merged = self._operator.apply(Window(base, matrix, task, self._start))
        if base is not None and space == "delta":
            # B + 0 loses the sign of a negative zero; where nothing changed, the base's bits stay.
            merged = torch.where(merged == base, base, merged)
        return to_bytes(merged, task.out_dtype)

    def _is_copy(self) -> bool:
        """Nothing of any expert is read in the whole tensor: the base's bits are the result."""
        if self._operator is None:
            return True
        return self._operator.schema.space == "delta" and not any(
            e.read for e in self._task.experts
        )

    def _needs_base(self) -> bool:
        if self._operator is None or self._operator.schema.space == "delta":
            return True
        n = self._stop - self._start
        return any(self._covered(e.read) < n for e in self._task.experts)

    def _covered(self, ranges: tuple[tuple[int, int], ...]) -> int:
        return total_elems(
            (max(a, self._start), min(b, self._stop))
            for a, b in ranges
            if b > self._start and a < self._stop
        )
