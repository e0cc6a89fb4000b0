"""Runs layers: read, merge, hash and write, each window once, several windows at a time.

Workers each read and merge one window, single-threaded, so that reading overlaps arithmetic and a
busy machine costs no more than its share; this thread hashes and writes in order. Windows of one
layer follow those of the layer before without a pause. The order of arithmetic is fixed per
element, so neither windows nor threads change a bit. No retry and no cache here: the caller knows
about actions and staging.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mergepipe_pipeline.arrays import U8Array
from mergepipe_pipeline.checkpoints.fp8_blocks import BlockCoder
from mergepipe_pipeline.checkpoints.header import tensor_order
from mergepipe_pipeline.checkpoints.stored import count_non_finite
from mergepipe_pipeline.checkpoints.writer import ShardWriter
from mergepipe_pipeline.concurrency.threads import READING, single_threaded_torch
from mergepipe_pipeline.concurrency.workers import FreeList, Workers, lookahead
from mergepipe_pipeline.domain.outcome import LayerOutcome, Realised, StoredObject
from mergepipe_pipeline.domain.plan import LayerTask, MergePlan, TensorTask
from mergepipe_pipeline.domain.segments import KnownSegments
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine.jobs import Job
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.engine.rescale import RescalePrepass
from mergepipe_pipeline.engine.sources import Read, SourcePool
from mergepipe_pipeline.engine.sums import TensorSums, WindowSums
from mergepipe_pipeline.engine.window import BufferPool, Window, cut
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.progress import Advance
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.storage.source import ANNOUNCED
from mergepipe_pipeline.storage.sums import SumsWriter, sums_beside


class LayerRunner:
    """Runs the layers of one plan with shared readers, threads and buffers; a context manager.

    What it reads is verified against `known` segments (None: not at all).
    """

    def __init__(
        self,
        plan: MergePlan,
        options: EngineOptions,
        known: KnownSegments | None = None,
        sums: Mapping[str, TensorSums] = MappingProxyType({}),
    ) -> None:
        """`sums`: by tensor, those that are kept beside its layer, as `sums_beside` says."""
        self._sums = sums
        self._prepass_threads = options.prepass_threads
        self._options = options.with_packs() if plan.packs else options
        is_read_twice = _has_second_reading(plan)
        if is_read_twice:
            self._options = self._options.with_second_reading()
        self._sources = SourcePool(plan, known, self._options.held_bytes)
        # What is read past the page cache is not announced to the disk.
        if not (plan.packs or is_read_twice or self._sources.reads_ahead):
            self._options = self._options.past_cache()
        self._window, make_buffers = _backend(options)
        self._buffers: FreeList[Any] = FreeList(make_buffers)
        self._n_inputs = sum(len(t.experts) for layer in plan.layers for t in layer.tasks)
        self._stack = ExitStack()
        self._has_torch = False
        self._page_buffers = FreeList(PageBuffer)
        self._has_packs = bool(plan.packs)

    def __enter__(self) -> LayerRunner:
        self._stack.enter_context(self._sources)
        self._workers = self._stack.enter_context(Workers(self._options.workers))
        self._readers = self._stack.enter_context(Workers(READING))
        prepass = RescalePrepass(self._sources, self._prepass_threads)
        self._prepass = self._stack.enter_context(prepass)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, layer: LayerTask, path: Path, advance: Advance | None = None) -> LayerOutcome:
        """Run one layer; see `run_all`."""
        (result,) = self.run_all([(layer, path)], advance)
        return result

    def run_all(
        self, layers: Sequence[tuple[LayerTask, Path]], advance: Advance | None = None
    ) -> Generator[LayerOutcome]:
        """Write merged layers, each to its path (a new file in staging), and say what each cost.

        A layer's outcome comes when its file is complete; the next one is being worked on then.
        `advance` gets the number of output bytes that each finished window wrote.
        Raises CheckpointChangedError if an input changed meanwhile, StorageFullError on a full
        disk, CorruptionError if the bytes read are not the bytes planned, or not those analysed.
        """
        self._sources.will_run([layer for layer, _ in layers])
        with closing(self._merged(self._windows([layer for layer, _ in layers]))) as merged:
            for layer, path in layers:
                yield self._written(layer, path, merged, advance)

    def _written(
        self, layer: LayerTask, path: Path, merged: Iterator[_Done], advance: Advance | None
    ) -> LayerOutcome:
        """Write a layer from its windows, the next of `merged`, and the sums that are kept."""
        started = time.monotonic()
        read, took_s, write_s, sums_read = Read(), 0.0, 0.0, 0
        non_finite: Counter[str] = Counter()
        described, coding = [d for t in layer.tasks for d in t.stored], _Coding(layer.tasks)
        kept_for = {self._sums[t.name].plan_id for t in layer.tasks if t.name in self._sums}
        shard = ShardWriter(path, described, {"format": "pt"}, coding.names)
        with shard as writer, ExitStack() as stack:
            sums = [stack.enter_context(SumsWriter(sums_beside(path), p)) for p in kept_for]
            while not writer.is_complete:
                done = next(merged, None)
                if done is None:
                    break  # `finish` says what is missing
                read, took_s = read + done.read, took_s + done.took_s
                if done.non_finite:
                    non_finite[done.tensor] += done.non_finite
                began = time.perf_counter()
                for piece in coding.pieces(done.tensor, done.out, is_last=done.last is not None):
                    writer.write(piece.data)
                    if advance:
                        advance(len(piece))
                if done.sums:
                    sums[0].add(done.tensor, done.start_elem, done.sums.pieces)
                    sums_read += done.sums.n_read
                write_s += time.perf_counter() - began
                if done.last:
                    done.last.finish()
            sha256, nbytes = writer.finish()
            counts = tuple(sorted(non_finite.items()))
            stored = StoredObject(sha256, nbytes, writer.prefix_digests, counts, coding.sq_error)
            kept_nbytes = sum(s.finish() for s in sums)
        self._verify(layer, read)
        cost = Realised(
            expert_bytes_read=read.expert_nbytes,
            base_bytes_read=read.base_nbytes,
            bytes_written=nbytes + kept_nbytes,
            layers_executed=1,
            layers_reused=0,
            layers_s=time.monotonic() - started,
            read_s=read.read_s,
            arithmetic_s=max(0.0, took_s - read.read_s),
            write_s=write_s,
            sum_bytes_read=sums_read,
        )
        return LayerOutcome(layer.name, layer.layer_key, stored, cost)

    def _verify(self, layer: LayerTask, read: Read) -> None:
        """Raise where an input changed meanwhile, or other bytes were read than planned."""
        self._sources.verify_unchanged()
        if read.expert_nbytes != layer.expert_bytes_planned:
            raise CorruptionError(
                "A layer did not read what its plan says",
                where=layer.name,
                expected=f"{layer.expert_bytes_planned} expert bytes",
                found=str(read.expert_nbytes),
                next_step="this is a defect of mergepipe: please report it with the plan",
            )

    def _windows(self, layers: Sequence[LayerTask]) -> Iterator[Window[Any]]:
        tasks = (task for layer in layers for task in _in_file_order(layer))
        for task in self._prepass.rescaled_ahead(tasks):
            job = Job(task, self._sources)
            job.sums = self._sums.get(task.name)
            if job.needs_torch and not self._has_torch:
                self._stack.enter_context(single_threaded_torch())
                self._has_torch = True
            numel = prod(task.shape)
            n = self._options.window_for(
                job.working_bytes_per_elem,
                itemsize(task.out_dtype),
                job.row_elems,
                self._n_inputs,
                job.ahead_bytes_per_elem,
            )
            for start, stop in cut(numel, min(numel, n)) if numel else ():
                yield self._window(job, start, stop)

    def _merged(self, windows: Iterator[Window[Any]]) -> Generator[_Done]:
        """Windows done, in order, while the next ones are being worked on."""
        ahead = ANNOUNCED if self._sources.reads_ahead else 0
        # A window may wait for the one before it, which failed or is cancelled: let it go, too.
        return self._workers.map(
            self._run_window,
            lookahead(self._with_frames(windows), ahead),
            depth=self._options.in_flight,
            on_cancel=lambda pair: pair[0].cancel(),
        )

    def _with_frames(self, windows: Iterator[Window[Any]]) -> Iterator[Window[Any]]:
        """The windows in order, once what they take from packs is read."""
        if not self._has_packs:
            return windows
        return self._readers.map(self._read_frames, windows, depth=READING)

    def _read_frames(self, window: Window[Any]) -> Window[Any]:
        before, buffer = self._sources.read_here(), self._page_buffers.take()
        buffer.clear()
        window.read_packed(buffer)
        window.read, window.page_buffer = self._sources.read_here() - before, buffer
        return window

    def _run_window(self, window_and_seen: tuple[Window[Any], list[Window[Any]]]) -> _Done:
        """Announce the windows seen, then read and merge one."""
        window, seen = window_and_seen
        for later in seen:
            later.announce()
        began, before = time.perf_counter(), self._sources.read_here()
        with self._buffers.lent() as buffers:
            out = window.run(buffers)
        if window.page_buffer:
            self._page_buffers.give_back(window.page_buffer)
        task = window.task
        non_finite = count_non_finite(out, task.out_dtype) + window.n_cut_off
        read = window.read + (self._sources.read_here() - before)
        last = window if window.is_last else None
        return _Done(
            tensor=task.name,
            start_elem=window.start_elem,
            out=out,
            sums=window.sums,
            non_finite=non_finite,
            read=read,
            took_s=time.perf_counter() - began + window.read.read_s,
            last=last,
        )


class _Coding:
    """Codes those tensors of a layer whose tasks say so; others pass as they are."""

    def __init__(self, tasks: Iterable[TensorTask]) -> None:
        self._shapes = {t.name: t.shape for t in tasks if t.is_coded}
        self._coder: BlockCoder | None = None
        #: Σ (w − what its code means)² of the tensors that are whole.
        self.sq_error = 0.0

    @property
    def names(self) -> frozenset[str]:
        """The tensors that are coded."""
        return frozenset(self._shapes)

    def pieces(self, tensor: str, out: U8Array, *, is_last: bool) -> Iterator[U8Array]:
        """The bytes to write once a window of a tensor is done; after its last one, the scales."""
        if tensor not in self._shapes:
            yield out
            return
        coder = self._coder = self._coder or BlockCoder(self._shapes[tensor])
        yield from coder.codes(out.view(np.float32))
        if is_last:
            yield coder.scales
            self.sq_error += coder.sq_error
            self._coder = None


def _in_file_order(layer: LayerTask) -> list[TensorTask]:
    tasks = {t.name: t for t in layer.tasks}
    order = tensor_order([(t.name, t.out_dtype, t.shape) for t in layer.tasks])
    return [tasks[name] for name, _, _ in order]


def _has_second_reading(plan: MergePlan) -> bool:
    """Whether experts are read for their norms before they are merged."""
    return any(e.l1 is not None for x in plan.layers for t in x.tasks for e in t.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A window's output bytes, how many are not finite or cut off, and what it read and took.

    `took_s` is of all threads that worked on it: those that read frames, and the one that merged.
    `last`: the window itself, if a tensor ends with it.
    """

    tensor: str
    start_elem: int
    out: U8Array
    sums: WindowSums | None
    non_finite: int
    read: Read
    took_s: float
    last: Window[Any] | None


def _backend(options: EngineOptions) -> tuple[type[Window[Any]], Callable[[], BufferPool]]:
    """The kind of window, and what makes a worker's buffers. Raises DeviceError."""
    if options.device == "cpu":
        return Window, BufferPool
    from mergepipe_pipeline.engine.accelerator import DeviceBufferPool, DeviceWindow, device_of

    return DeviceWindow, partial(DeviceBufferPool, device_of(options.device))
