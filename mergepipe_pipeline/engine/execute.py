"""Runs layers: read, merge, hash and write, each window once, several windows at a time.

Workers each read and merge one window, single-threaded, so that reading overlaps arithmetic and a
busy machine costs no more than its share; this thread hashes and writes in order. The order of
arithmetic is fixed per element, so neither windows nor threads change a bit. No retry and no cache
here: the caller knows about actions and staging.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import TracebackType

from mergepipe_pipeline.engine.jobs import Job
from mergepipe_pipeline.engine.settle import Settler
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.engine.window import Slot, Window
from mergepipe_pipeline.engine.windows import EngineOptions, cut
from mergepipe_pipeline.engine.workspace import Desk
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.spec.plan import LayerTask, MergePlan, TensorTask
from mergepipe_pipeline.storage.finite import count_non_finite
from mergepipe_pipeline.storage.header import tensor_order
from mergepipe_pipeline.storage.source import ANNOUNCED
from mergepipe_pipeline.storage.writer import ShardWriter
from mergepipe_pipeline.tensors.stored import Bytes

#: Called with the output bytes that a finished window wrote.
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What running a layer gave: the object's digest and size in bytes, and the bytes it cost.

    `tensors` are (name, SHA-256 of the file up to the end of that tensor) in file order. Of the
    workers' time, added up over threads, `read_s` went to reading and `arithmetic_s` to merging;
    `write_s` is what this thread spent on hashing and writing. `non_finite` are names of tensors
    with NaN or infinity, and how many elements.
    """

    sha256: str
    nbytes: int
    tensors: tuple[tuple[str, str], ...]
    expert_bytes_read: int
    base_bytes_read: int
    wall_s: float
    read_s: float
    arithmetic_s: float
    write_s: float
    non_finite: tuple[tuple[str, int], ...]


class LayerRunner:
    """Runs the layers of one plan with shared readers, threads and buffers; a context manager."""

    def __init__(self, plan: MergePlan, options: EngineOptions) -> None:
        self._options = options
        self._sources = SourcePool(plan)
        self._slots = _slots(options)
        self._n_inputs = sum(len(t.experts) for layer in plan.layers for t in layer.tasks)
        self._stack = ExitStack()
        self._has_torch = False
        self._work_s = 0.0

    def __enter__(self) -> LayerRunner:
        self._stack.enter_context(self._sources)
        threads = self._options.threads
        self._pool = self._stack.enter_context(ThreadPoolExecutor(threads))
        self._settler = self._stack.enter_context(Settler(self._sources, threads))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(
        self,
        layer: LayerTask,
        path: Path,
        progress: Progress | None = None,
        upcoming: LayerTask | None = None,
    ) -> LayerResult:
        """Write the merged layer to `path` (a new file in staging) and say what it cost.

        The layer that is `upcoming`, if any, is begun with while this one's end is being written.
        Raises CheckpointChangedError if an input changed meanwhile, StorageFullError on a full
        disk, CorruptionError if the bytes read are not the bytes planned.
        """
        started = time.monotonic()
        expert_before, base_before = self._sources.bytes_read()
        read_before, work_before, write_s = self._sources.read_s(), self._work_s, 0.0
        tasks = _in_file_order(layer)
        described = [(t.name, t.out_dtype, t.shape) for t in tasks]
        with ShardWriter(path, described, {"format": "pt"}) as writer:
            later = _in_file_order(upcoming) if upcoming else []
            non_finite: Counter[str] = Counter()
            for chunk in self._merged(self._windows(tasks, later), non_finite):
                began = time.perf_counter()
                writer.write(chunk.data)
                write_s += time.perf_counter() - began
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
        read_s = self._sources.read_s() - read_before
        return LayerResult(
            sha256,
            nbytes,
            prefixes,
            expert_after - expert_before,
            base_after - base_before,
            time.monotonic() - started,
            read_s,
            max(0.0, self._work_s - work_before - read_s),
            write_s,
            tuple(sorted(non_finite.items())),
        )

    def _windows(self, tasks: list[TensorTask], later: list[TensorTask]) -> Iterator[Window]:
        number = 0
        for task in self._settler.ahead(tasks):
            job = Job(task, self._sources)
            if job.needs_torch and not self._has_torch:
                self._load_torch()
            numel = prod(task.shape)
            n = self._options.window_for(job.bytes_per_elem, job.row_elems, self._n_inputs)
            for start, stop in cut(numel, min(numel, n)) if numel else ():
                yield self._slots[number % len(self._slots)](job, start, stop)
                number += 1
        self._settler.begin(later)

    def _taken(self, future: Future[_Done], non_finite: Counter[str]) -> Bytes:
        done = future.result()
        self._work_s += done.took_s
        if done.non_finite:
            non_finite[done.tensor] += done.non_finite
        return done.out

    def _load_torch(self) -> None:
        import torch

        # Windows are the parallelism; threads inside an operation would wait for each other.
        self._stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        self._has_torch = True

    def _merged(self, windows: Iterator[Window], non_finite: Counter[str]) -> Iterator[Bytes]:
        """Output bytes of windows in order, while the next ones are being worked on.

        Adds to `non_finite` per tensor how many elements are not.
        A window's desk is cleared only after the caller came back for the next one.
        """
        pending: deque[Future[_Done]] = deque()
        try:
            for window, later in _with_later(windows):
                pending.append(self._pool.submit(_worked, window, later))
                if len(pending) == len(self._slots):
                    yield self._taken(pending.popleft(), non_finite)
            while pending:
                yield self._taken(pending.popleft(), non_finite)
        finally:
            for future in pending:
                future.cancel()


def _in_file_order(layer: LayerTask) -> list[TensorTask]:
    tasks = {t.name: t for t in layer.tasks}
    order = tensor_order([(t.name, t.out_dtype, t.shape) for t in layer.tasks])
    return [tasks[name] for name, _, _ in order]


def _with_later(windows: Iterator[Window]) -> Iterator[tuple[Window, list[Window]]]:
    """Windows in order, each with those that are to be announced before it is worked on."""
    waiting: deque[Window] = deque()
    later: list[Window] = []
    for window in windows:
        waiting.append(window)
        later.append(window)
        if len(waiting) > ANNOUNCED:
            yield waiting.popleft(), later
            later = []
    for window in waiting:
        yield window, later
        later = []


@dataclass(frozen=True, slots=True)
class _Done:
    """A window's output bytes, how many elements are not finite, and the seconds it took."""

    tensor: str
    out: Bytes
    non_finite: int
    took_s: float


def _worked(window: Window, later: list[Window]) -> _Done:
    for announced in later:
        announced.announce()
    began, task = time.perf_counter(), window.task
    out = window.run()
    non_finite = count_non_finite(out, task.out_dtype)
    return _Done(task.name, out, non_finite, time.perf_counter() - began)


def _slots(options: EngineOptions) -> list[Slot]:
    """Where windows in flight are worked on. Raises DeviceError if the device is not there."""
    if options.device == "cpu":
        return [partial(Window, Desk()) for _ in range(options.slots)]
    from mergepipe_pipeline.engine.accelerator import device_slots

    return device_slots(options.device, options.slots)
