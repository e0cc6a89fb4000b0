"""Work that runs ahead in threads while its results are taken in order.

Knows nothing of tensors. Memory is that of the jobs under way: their buffers are used again,
because faulting in fresh pages for every window costs as much as the arithmetic.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

#: More threads only hold more windows: the hashes of one tensor are taken in order.
_MAX_THREADS = 4
#: Jobs that the disk is told about before they run.
_HINTED = 12

T = TypeVar("T")


class Buffers:
    """Room for one job's inputs and rows, grown to the largest need."""

    def __init__(self) -> None:
        self._bytes: list[npt.NDArray[np.uint8]] = []
        self._rows = np.empty(0, dtype=np.float32)

    def bytes(self, number: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Input `number`: uint8 [nbytes]."""
        while len(self._bytes) <= number:
            self._bytes.append(np.empty(0, dtype=np.uint8))
        if len(self._bytes[number]) < nbytes:
            self._bytes[number] = np.empty(nbytes, dtype=np.uint8)
        return self._bytes[number][:nbytes]

    def rows(self, count: int, n: int) -> npt.NDArray[np.float32]:
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
        # What this process may use: more threads than cores only evict each other's windows.
        self._threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._free: list[Buffers] = []
        self._lock = threading.Lock()
        self._torch_threads: int | None = None

    def __enter__(self) -> RunAhead:
        self._pool = ThreadPoolExecutor(self._threads)
        return self

    def load_torch(self) -> None:
        """Load torch for jobs that need it, which takes a second, and keep it to one thread each.

        Each job is one thread's work; torch must not start threads of its own inside.
        """
        with self._lock:
            if self._torch_threads is None:
                import torch

                self._torch_threads = torch.get_num_threads()
                torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._torch_threads is not None:
            import torch

            torch.set_num_threads(self._torch_threads)

    def results(self, jobs: Iterator[Job[T]]) -> Iterator[T]:
        """What jobs give, in order; a result may use its buffers until the next one is taken."""
        waiting: deque[Job[T]] = deque()
        unhinted: list[Job[T]] = []
        running: deque[tuple[Future[T], Buffers]] = deque()
        while True:
            while len(waiting) < _HINTED and (job := next(jobs, None)) is not None:
                waiting.append(job)
                unhinted.append(job)
            while waiting and len(running) <= self._threads:
                buffers = self._free.pop() if self._free else Buffers()
                future = self._pool.submit(_run, waiting.popleft(), unhinted, buffers)
                running.append((future, buffers))
                unhinted = []
            if not running:
                return
            future, buffers = running.popleft()
            yield future.result()
            self._free.append(buffers)


def _run(job: Job[T], upcoming: list[Job[T]], buffers: Buffers) -> T:
    """Run a job, after a word about those that come later: finding room for them takes time."""
    for later in upcoming:
        later.hint()
    return job.run(buffers)
