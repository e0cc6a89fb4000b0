"""Windows of tensors of one or several models, computed in threads, given back in order.

The window length depends on the number of models alone: statistics must not depend on how much
memory or how many threads there are. Memory is a few windows, whatever the tensor's size; their
buffers are reused, because faulting in fresh pages for every window costs as much as the
arithmetic.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.view import TensorView
from mergepipe_pipeline.storage.reader import BlockReader
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.tensors.low_rank import LowRankUpdate
from mergepipe_pipeline.tensors.rows import BaseRow, ExpertRow

#: Elements per window of one expert; a multiple of every block size.
WINDOW_ELEMS = 1 << 20
#: Elements whose sums are taken at once; every block size is a multiple of it.
CHUNK_ELEMS = 4096
#: More threads only hold more windows: the hashes of a tensor are taken in order, in one thread.
_MAX_THREADS = 4

Floats = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True)
class DeltaWindow:
    """Elements [start_elem, start_elem + n) of one expert; valid until the next window is taken.

    `expert_raw` and `base_raw` are the stored bytes that were read; `delta` is float32 [m], m ≥ n a
    multiple of CHUNK_ELEMS, zero from n on. `same` says that both have equal bytes.
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


@dataclass(frozen=True)
class GroupWindow:
    """Elements [start_elem, start_elem + n) of K experts and their base, as an operator sees them.

    `base` [n] or None, `rows` [K, n], both float32; valid until the next window is taken.
    """

    start_elem: int
    base: torch.Tensor | None
    rows: torch.Tensor
    nbytes: int


class _Buffers:
    """Room for one window of several inputs, grown to the largest need."""

    def __init__(self) -> None:
        self._bytes: list[npt.NDArray[np.uint8]] = []
        self._rows = np.empty(0, dtype=np.float32)

    def bytes(self, number: int, nbytes: int) -> npt.NDArray[np.uint8]:
        while len(self._bytes) <= number:
            self._bytes.append(np.empty(0, dtype=np.uint8))
        if len(self._bytes[number]) < nbytes:
            self._bytes[number] = np.empty(nbytes, dtype=np.uint8)
        return self._bytes[number][:nbytes]

    def rows(self, count: int, n: int) -> Floats:
        if len(self._rows) < count * n:
            self._rows = np.empty(count * n, dtype=np.float32)
        return self._rows[: count * n].reshape(count, n)


class WindowReader:
    """Checkpoints open for reading by number, as views name them; a context manager."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self._sources = [open_source(c.root) for c in checkpoints]
        self._readers = [
            BlockReader(source, c, None)
            for source, c in zip(self._sources, checkpoints, strict=True)
        ]
        # What this process may use: more threads than cores only evict each other's windows.
        self._threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._free: list[_Buffers] = []

    def __enter__(self) -> WindowReader:
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

    def deltas(
        self,
        expert: TensorView,
        base: TensorView,
        work: Callable[[DeltaWindow], T],
        *,
        row_elems: int = 1,
        only: int | None = None,
    ) -> Iterator[T]:
        """`work(window)` for every window of an expert's tensor, in order; a few run ahead.

        Windows hold whole rows of `row_elems`. `only`: the one window of that number. Raises
        CheckpointChangedError if a file ends early.
        """
        updates = (self._update(expert), self._update(base))

        def run(start: int, stop: int, buffers: _Buffers) -> T:
            return work(self._delta(expert, base, updates, start, stop, buffers))

        return self._map(expert.numel, self._length(1, row_elems), run, only)

    def groups(
        self,
        experts: Sequence[TensorView],
        base: TensorView | None,
        numel: int,
        work: Callable[[GroupWindow], T],
        *,
        as_delta: bool,
        row_elems: int = 1,
        only: int | None = None,
    ) -> Iterator[T]:
        """`work(window)` for every window of `numel` elements of all experts, as δ or as values."""
        updates = [self._update(v) for v in experts]
        base_update = self._update(base) if base else None

        def run(start: int, stop: int, buffers: _Buffers) -> T:
            nbytes, below = 0, None
            table = torch.from_numpy(buffers.rows(len(experts) + 1, stop - start))
            rows, base_values = table[:-1], table[-1]
            if base is not None:
                raw = buffers.bytes(len(experts), (stop - start) * itemsize(base.dtype))
                base_row = BaseRow(self._reader, base, raw, base_update)
                base_row.fetch(start, stop)
                below = base_row.values(base_values)
                nbytes += len(raw)
            for i, (view, update) in enumerate(zip(experts, updates, strict=True)):
                raw = buffers.bytes(i, (stop - start) * itemsize(view.dtype))
                row = ExpertRow(self._reader, view, ((0, view.numel),), raw, update)
                row.fetch(start, stop)
                (row.delta if as_delta else row.value)(rows[i], below)
                nbytes += len(raw) if view.stored else 0
            return work(GroupWindow(start, below, rows, nbytes))

        return self._map(numel, self._length(len(experts), row_elems), run, only)

    def verify_unchanged(self) -> None:
        """Raise CheckpointChangedError if a file was replaced meanwhile."""
        for reader in self._readers:
            reader.verify_unchanged()

    def _reader(self, source: int) -> BlockReader:
        return self._readers[source]

    def _update(self, view: TensorView) -> LowRankUpdate | None:
        return LowRankUpdate(self._reader, view.low_rank) if view.low_rank else None

    def _length(self, n_experts: int, row_elems: int) -> int:
        """Elements of a window: about as many bytes for any number of experts, in whole rows."""
        elems = max(CHUNK_ELEMS, WINDOW_ELEMS // max(1, n_experts))
        return max(1, elems // row_elems) * row_elems

    def _map(
        self,
        numel: int,
        length: int,
        run: Callable[[int, int, _Buffers], T],
        only: int | None,
    ) -> Iterator[T]:
        pending: deque[tuple[Future[T], _Buffers]] = deque()
        starts = deque(range(0, numel, length) if only is None else [only * length])
        while starts or pending:
            while starts and len(pending) <= self._threads:
                buffers = self._free.pop() if self._free else _Buffers()
                start = starts.popleft()
                future = self._pool.submit(run, start, min(numel, start + length), buffers)
                pending.append((future, buffers))
            future, buffers = pending.popleft()
            yield future.result()
            self._free.append(buffers)

    def _delta(
        self,
        expert: TensorView,
        base: TensorView,
        updates: tuple[LowRankUpdate | None, LowRankUpdate | None],
        start: int,
        stop: int,
        buffers: _Buffers,
    ) -> DeltaWindow:
        n = stop - start
        raw_e = buffers.bytes(0, n * itemsize(expert.dtype) if expert.stored else 0)
        raw_b = buffers.bytes(1, n * itemsize(base.dtype) if expert.stands_alone else 0)
        row = ExpertRow(self._reader, expert, ((0, expert.numel),), raw_e, updates[0])
        row.fetch(start, stop)
        below = None
        if expert.stands_alone:
            below = BaseRow(self._reader, base, raw_b, updates[1])
            below.fetch(start, stop)
        delta, base_values = buffers.rows(2, _padded(n))
        same = (
            below is not None
            and updates == (None, None)
            and expert.dtype == base.dtype
            and _equal(raw_e, raw_b)
        )
        if same:
            delta[:] = 0
        else:
            delta[n:] = 0
            values = below.values(torch.from_numpy(base_values[:n])) if below else None
            row.delta(torch.from_numpy(delta[:n]), values)
        return DeltaWindow(start, n, raw_e.data, raw_b.data, delta, same)


def _equal(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> bool:
    # Most windows differ early: look there before comparing all.
    return np.array_equal(a[:CHUNK_ELEMS], b[:CHUNK_ELEMS]) and np.array_equal(a, b)


def _padded(n: int) -> int:
    return -(-n // CHUNK_ELEMS) * CHUNK_ELEMS
