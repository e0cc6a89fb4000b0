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
from pathlib import Path
from types import TracebackType

import torch

from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine.delta import BaseRow, Bytes, FullCheckpointRow, to_bytes
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.engine.windows import EngineOptions, cut
from mergepipe_pipeline.engine.workspace import Desk
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
            sizes = [itemsize(e.tensor.dtype) for e in task.experts]
            sizes += [itemsize(task.base.tensor.dtype)] if task.base else []
            numel = (task.base.tensor if task.base else task.experts[0].tensor).numel
            n = min(numel, self._options.window_for(len(task.experts), max(sizes)))
            for start, stop in cut(numel, n) if n else ():
                desk = self._desks[number % len(self._desks)]
                yield _Window(task, self._sources, desk, start, stop, sizes)
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


class _Window:
    """One run of elements of one output tensor, from bytes to bytes."""

    def __init__(
        self,
        task: TensorTask,
        sources: SourcePool,
        desk: Desk,
        start: int,
        stop: int,
        sizes: list[int],
    ) -> None:
        self._task, self._sources, self._desk = task, sources, desk
        self._start, self._stop, self._sizes = start, stop, sizes
        self._operator: Operator | None = OPERATORS.get(task.operator)
        self._experts: list[FullCheckpointRow] = []
        self._base: BaseRow | None = None

    def run(self) -> Bytes:
        """Read what the plan allows, merge it, and give the window's output bytes."""
        self._fetch()
        return self._merge()

    def _fetch(self) -> None:
        n = self._stop - self._start
        self._desk.clear(n * sum(self._sizes), len(self._sizes))
        if self._task.base and self._needs_base():
            reader = self._sources.base(self._task.base.source)
            buffer = self._desk.take(n * self._sizes[-1])
            self._base = BaseRow(reader, self._task.base.tensor, buffer)
            self._base.fetch(self._start, self._stop)
        for e, size in zip(self._task.experts, self._sizes, strict=False):
            reader = self._sources.expert(e.source)
            row = FullCheckpointRow(reader, e, self._desk.take(n * size))
            row.fetch(self._start, self._stop)
            self._experts.append(row)

    def _merge(self) -> Bytes:
        task = self._task
        if self._is_copy():
            assert self._base is not None
            same = task.base is not None and task.base.tensor.dtype == task.out_dtype
            return self._base.raw.copy() if same else to_bytes(self._base.values(), task.out_dtype)
        assert self._operator is not None
        space = self._operator.schema.space
        base = self._base.values() if self._base else None
        rows = self._desk.rows(len(self._experts), self._stop - self._start)
        for row, expert in zip(rows, self._experts, strict=True):
            expert.fill(row, base, space)
        merged = self._operator.apply(Window(base, rows, task, self._start))
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
