"""Work that runs ahead in threads while its results are taken in order.

Knows nothing of tensors. Memory is that of the jobs under way: their buffers are used again,
because faulting in fresh pages for every window costs as much as the arithmetic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from mergepipe_pipeline.arrays import F32Array, U8Array
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import FreeList, Workers, lookahead

#: Jobs that the disk is told about before they run.
_HINTED = 12

T = TypeVar("T")


class Buffers:
    """Room for one job's inputs and rows, grown to the largest need."""

    def __init__(self) -> None:
        self._bytes: list[U8Array] = []
        self._rows = np.empty(0, dtype=np.float32)

    def bytes(self, number: int, nbytes: int) -> U8Array:
        """Input `number`: uint8 [nbytes]."""
        while len(self._bytes) <= number:
            self._bytes.append(np.empty(0, dtype=np.uint8))
        if len(self._bytes[number]) < nbytes:
            self._bytes[number] = np.empty(nbytes, dtype=np.uint8)
        return self._bytes[number][:nbytes]

    def rows(self, count: int, n: int) -> F32Array:
        """Float32 [count, n]."""
        if len(self._rows) < count * n:
            self._rows = np.empty(count * n, dtype=np.float32)
        return self._rows[: count * n].reshape(count, n)


@dataclass(frozen=True)
class Job(Generic[T]):
    """The work on one window, and a word to the disk before it."""

    run: Callable[[Buffers], T]
    hint: Callable[[], None]


class RunAhead:
    """Threads and their buffers; a context manager."""

    def __init__(self) -> None:
        self._buffers = FreeList(Buffers)
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._has_torch = False

    def __enter__(self) -> RunAhead:
        self._workers = self._stack.enter_context(Workers(threads.analysis()))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def load_torch(self) -> None:
        """Load torch, which takes a second, for jobs that need it: one thread for each."""
        with self._lock:
            if not self._has_torch:
                self._stack.enter_context(threads.single_threaded_torch())
                self._has_torch = True

    def results(self, jobs: Iterator[Job[T]]) -> Iterator[T]:
        """What jobs give, in order; a result may use its buffers until the next one is taken."""

        def run(job_and_seen: tuple[Job[T], list[Job[T]]]) -> tuple[T, Buffers]:
            job, seen = job_and_seen
            for later in seen:  # not in the caller's thread: the disk takes time to find room
                later.hint()
            buffers = self._buffers.take()
            return job.run(buffers), buffers

        depth = threads.analysis() + 1
        for of_job, buffers in self._workers.map(run, lookahead(jobs, _HINTED - 1), depth=depth):
            yield of_job
            self._buffers.give_back(buffers)
