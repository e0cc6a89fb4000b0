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

from mergepipe_pipeline.engine.jobs import Job
from mergepipe_pipeline.engine.settle import Settler
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.engine.window import Window
from mergepipe_pipeline.engine.windows import EngineOptions, cut
from mergepipe_pipeline.engine.workspace import Desk
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.spec.plan import LayerTask, MergePlan, TensorTask
from mergepipe_pipeline.storage.writer import ShardWriter
from mergepipe_pipeline.tensors.stored import Bytes

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
        threads = self._options.threads
        self._pool = self._stack.enter_context(ThreadPoolExecutor(threads))
        self._settler = Settler(self._sources, self._pool, threads)
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

    def _windows(self, tasks: list[TensorTask]) -> Iterator[Window]:
        number = 0
        for task in tasks:
            job = Job(self._settler.settled(task), self._sources)
            numel = prod(task.shape)
            n = self._options.window_for(job.bytes_per_elem, job.row_elems)
            for start, stop in cut(numel, min(numel, n)) if numel else ():
                yield Window(job, self._desks[number % len(self._desks)], start, stop)
                number += 1

    def _merged(self, windows: Iterator[Window]) -> Iterator[Bytes]:
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
