"""Windows of δ = float32(expert) − float32(base), computed in threads, in order.

The window length is fixed: statistics must not depend on how much memory or how many threads there
are.
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

from mergepipe_pipeline.dtypes import TORCH_NAME
from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.spec.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.storage.reader import BlockReader
from mergepipe_pipeline.storage.source import open_source

#: Elements per window; a multiple of every block size.
WINDOW_ELEMS = 1 << 20
#: Elements whose sums are taken at once; every block size is a multiple of it.
CHUNK_ELEMS = 4096

Floats = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True)
class DeltaWindow:
    """Elements [start_elem, start_elem + n) of one tensor.

    `expert_raw` and `base_raw` are the stored bytes; `delta` is float32 [m], m ≥ n a multiple of
    CHUNK_ELEMS, zero from n on. `same` says that both have equal bytes.
    """

    start_elem: int
    n: int
    expert_raw: bytearray
    base_raw: bytearray
    delta: Floats
    same: bool

    @property
    def values(self) -> Floats:
        """The n deltas without padding."""
        return self.delta[: self.n]


class PairReader:
    """An expert and its base, open for reading; a context manager."""

    def __init__(
        self, expert: Checkpoint, base: Checkpoint, window_elems: int = WINDOW_ELEMS
    ) -> None:
        self._expert, self._base = expert, base
        self._sources = (open_source(expert.root), open_source(base.root))
        self._readers = (
            BlockReader(self._sources[0], expert, None),
            BlockReader(self._sources[1], base, None),
        )
        self._window_elems = window_elems
        self._threads = max(1, os.cpu_count() or 1)

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
        """The expert's entries of all tensors that both have with equal shape, in the base's order."""
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
        pending: deque[Future[T]] = deque()
        for start in range(0, expert.numel, self._window_elems):
            stop = min(expert.numel, start + self._window_elems)
            pending.append(
                self._pool.submit(lambda a, b: work(self._load(expert, base, a, b)), start, stop)
            )
            if len(pending) > self._threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def window(self, tensor: str, number: int) -> DeltaWindow:
        """Window `number` of a tensor, read again."""
        expert, base = self._entries(tensor)
        start = number * self._window_elems
        return self._load(expert, base, start, min(expert.numel, start + self._window_elems))

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

    def _load(self, expert: TensorEntry, base: TensorEntry, start: int, stop: int) -> DeltaWindow:
        raw_e = self._readers[0].read(expert, start, stop)
        raw_b = self._readers[1].read(base, start, stop)
        n = stop - start
        padded = np.zeros(-(-n // CHUNK_ELEMS) * CHUNK_ELEMS, dtype=np.float32)
        same = expert.dtype == base.dtype and raw_e == raw_b
        if not same:
            delta = torch.from_numpy(padded)[:n]
            delta.copy_(_typed(raw_e, expert.dtype))
            delta.sub_(_typed(raw_b, base.dtype).to(torch.float32))
        return DeltaWindow(start, n, raw_e, raw_b, padded, same)


def _typed(raw: bytearray, dtype: str) -> torch.Tensor:
    return torch.frombuffer(raw, dtype=getattr(torch, TORCH_NAME[dtype]))
