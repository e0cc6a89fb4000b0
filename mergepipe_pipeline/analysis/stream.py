"""Windows of δ = float32(expert) − float32(base), computed in threads, in order.

The window length is fixed: statistics must not depend on how much memory or how many threads there
are. Memory is a few windows, whatever the tensor's size; their buffers are reused, because faulting
in fresh pages for every window costs as much as the arithmetic.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mergepipe_pipeline.dtypes import TORCH_NAME, itemsize
from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.spec.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.storage.reader import BlockReader
from mergepipe_pipeline.storage.source import open_source

#: Elements per window; a multiple of every block size.
WINDOW_ELEMS = 1 << 20
#: Elements whose sums are taken at once; every block size is a multiple of it.
CHUNK_ELEMS = 4096
#: More threads only hold more windows: the hashes of a tensor are taken in order, in one thread.
_MAX_THREADS = 4
_MAX_ITEMSIZE = 8

Floats = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True)
class DeltaWindow:
    """Elements [start_elem, start_elem + n) of one tensor; valid until the next window is taken.

    `expert_raw` and `base_raw` are the stored bytes; `delta` is float32 [m], m ≥ n a multiple of
    CHUNK_ELEMS, zero from n on. `same` says that both have equal bytes.
    """

    start_elem: int
    n: int
    expert_raw: memoryview
    base_raw: memoryview
    delta: Floats
    same: bool

    @property
    def values(self) -> Floats:
        """The n deltas without padding."""
        return self.delta[: self.n]


class _Buffers:
    """Room for one window of any dtype; pages that a dtype does not need are never touched."""

    def __init__(self, window_elems: int) -> None:
        self.expert = np.empty(window_elems * _MAX_ITEMSIZE, dtype=np.uint8)
        self.base = np.empty(window_elems * _MAX_ITEMSIZE, dtype=np.uint8)
        self.base_values = np.empty(window_elems, dtype=np.float32)
        self.delta = np.empty(_padded(window_elems), dtype=np.float32)


class PairReader:
    """An expert and its base, open for reading; a context manager.

    `window_elems` is for tests: the length of windows instead of WINDOW_ELEMS.
    """

    def __init__(
        self, expert: Checkpoint, base: Checkpoint, window_elems: int | None = None
    ) -> None:
        self._expert, self._base = expert, base
        self._sources = (open_source(expert.root), open_source(base.root))
        self._readers = (
            BlockReader(self._sources[0], expert, None),
            BlockReader(self._sources[1], base, None),
        )
        self._window_elems = window_elems or WINDOW_ELEMS
        # What this process may use: more threads than cores only evict each other's windows.
        self._threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._free: list[_Buffers] = []

    def __enter__(self) -> PairReader:
        self._pool = ThreadPoolExecutor(self._threads)
        # Each window is one thread's work; torch must not start threads of its own inside.
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._torch_threads)
        for source in self._sources:
            source.close()

    def shared(self) -> list[TensorEntry]:
        """The expert's entries of tensors that both have with equal shape, in the base's order."""
        names = self._expert.by_name
        return [
            names[t.name]
            for t in self._base.tensors
            if t.name in names and names[t.name].shape == t.shape
        ]

    def map(self, tensor: str, work: Callable[[DeltaWindow], T]) -> Iterator[T]:
        """`work(window)` for every window of a tensor, in order; a few windows run ahead.

        Raises IncompatibleCheckpointsError for a tensor that not both have, CheckpointChangedError
        if a file ends early.
        """
        expert, base = self._entries(tensor)

        def load_and_work(start: int, buffers: _Buffers) -> T:
            return work(self._load(expert, base, start, buffers))

        pending: deque[tuple[Future[T], _Buffers]] = deque()
        starts = deque(range(0, expert.numel, self._window_elems))
        while starts or pending:
            while starts and len(pending) <= self._threads:
                buffers = self._free.pop() if self._free else _Buffers(self._window_elems)
                future = self._pool.submit(load_and_work, starts.popleft(), buffers)
                pending.append((future, buffers))
            future, buffers = pending.popleft()
            yield future.result()
            self._free.append(buffers)

    def window(self, tensor: str, number: int) -> DeltaWindow:
        """Window `number` of a tensor, read again into memory of its own."""
        expert, base = self._entries(tensor)
        buffers = _Buffers(self._window_elems)
        return self._load(expert, base, number * self._window_elems, buffers)

    def verify_unchanged(self) -> None:
        """Raise CheckpointChangedError if a file was replaced meanwhile."""
        for reader in self._readers:
            reader.verify_unchanged()

    def _entries(self, tensor: str) -> tuple[TensorEntry, TensorEntry]:
        expert, base = self._expert.by_name.get(tensor), self._base.by_name.get(tensor)
        if expert is None or base is None or expert.shape != base.shape:
            raise IncompatibleCheckpointsError(
                "A tensor cannot be compared",
                where=f"{self._expert.name}, tensor {tensor}",
                expected=f"the shape it has in {self._base.name}: {base and list(base.shape)}",
                found=str(expert and list(expert.shape)),
                next_step="use experts of this base",
            )
        return expert, base

    def _load(
        self, expert: TensorEntry, base: TensorEntry, start: int, buffers: _Buffers
    ) -> DeltaWindow:
        stop = min(expert.numel, start + self._window_elems)
        n = stop - start
        raw_e = buffers.expert[: n * itemsize(expert.dtype)]
        raw_b = buffers.base[: n * itemsize(base.dtype)]
        self._readers[0].read_into(expert, start, stop, raw_e.data)
        self._readers[1].read_into(base, start, stop, raw_b.data)
        padded = buffers.delta[: _padded(n)]
        same = expert.dtype == base.dtype and _equal(raw_e, raw_b)
        if same:
            padded[:] = 0
        else:
            padded[n:] = 0
            delta, base_values = (torch.from_numpy(a[:n]) for a in (padded, buffers.base_values))
            delta.copy_(_typed(raw_e, expert.dtype))
            delta.sub_(base_values.copy_(_typed(raw_b, base.dtype)))
        return DeltaWindow(start, n, raw_e.data, raw_b.data, padded, same)


def _equal(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> bool:
    # Most windows differ early: look there before comparing all.
    return np.array_equal(a[:CHUNK_ELEMS], b[:CHUNK_ELEMS]) and np.array_equal(a, b)


def _padded(n: int) -> int:
    return -(-n // CHUNK_ELEMS) * CHUNK_ELEMS


def _typed(raw: npt.NDArray[np.uint8], dtype: str) -> torch.Tensor:
    return torch.from_numpy(raw).view(getattr(torch, TORCH_NAME[dtype]))
