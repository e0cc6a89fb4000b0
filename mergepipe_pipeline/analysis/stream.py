"""Windows of tensors of one or several models, computed in threads, given back in order.

The window length depends on the number of models alone: statistics must not depend on how much
memory or how many threads there are. Memory is a few windows, whatever the tensor's size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from mergepipe_pipeline.arrays import F32Array, U8Array
from mergepipe_pipeline.checkpoints.low_rank import AdapterUpdate, open_update
from mergepipe_pipeline.checkpoints.reader import BlockReader, open_reader
from mergepipe_pipeline.checkpoints.stored import Verifiers, Verify, announce_stored
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import FreeList, Workers, lookahead
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.segments import KnownSegments
from mergepipe_pipeline.domain.view import TensorView, parts_of
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.operators.kernels.bits import subtract
from mergepipe_pipeline.operators.kernels.kept_l1 import CHUNK_ELEMS
from mergepipe_pipeline.packs.rows import BaseRow, ExpertRow
from mergepipe_pipeline.storage.source import Reading
from mergepipe_pipeline.storage.uncached import fits_page_cache

if TYPE_CHECKING:
    import torch

#: Elements per window of one expert; a multiple of every block size.
WINDOW_ELEMS = 1 << 20

#: Jobs that the disk is told about before they run.
_HINTED = 12

T = TypeVar("T")


@dataclass
class DeltaWindow:
    """Elements [start_elem, start_elem + n) of one expert; valid until the next window is taken.

    `expert_raw` and `base_raw` are the stored bytes that were read. `dtype` is that of both where δ
    is nothing but their difference, else None. `make` computes δ when it is first asked for.
    """

    start_elem: int
    n: int
    expert_raw: memoryview
    base_raw: memoryview
    dtype: str | None
    make: Callable[[], F32Array]

    @cached_property
    def delta(self) -> F32Array:
        """Float32 [m], m ≥ n a multiple of CHUNK_ELEMS, zero from n on."""
        return self.make()

    @property
    def values(self) -> F32Array:
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


@dataclass(frozen=True)
class Family:
    """A tensor of the base with the tensors of experts that differ from it."""

    experts: tuple[TensorView, ...]
    base: TensorView

    @property
    def hashed_with(self) -> int | None:
        """The expert that is compared with all of a plain base, so that its pass hashes both."""
        numels = [v.numel if v.stands_alone else -1 for v in self.experts]
        is_hashed = self.base.is_plain and self.base.numel in numels
        return numels.index(self.base.numel) if is_hashed else None


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
        """Yield what jobs give, in order; a result may use its buffers until the next is taken."""

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


class WindowReader:
    """Checkpoints open for reading by number, as views name them; a context manager.

    What a pass reads is verified against `known` segments (None: not at all).
    """

    def __init__(
        self, checkpoints: Sequence[Checkpoint], known: KnownSegments | None = None
    ) -> None:
        self._known = known
        #: Of the tensors, or families of them, that are under way.
        self._verifiers: deque[Verifiers] = deque()
        fits = fits_page_cache(sum(c.nbytes for c in checkpoints))
        reading: Reading = "ahead" if fits else "once"
        self._stack = ExitStack()
        self._readers = [self._stack.enter_context(open_reader(c, reading)) for c in checkpoints]
        self._ahead = RunAhead()

    def __enter__(self) -> WindowReader:
        self._ahead.__enter__()
        return self

    def __exit__(self, *ended: object) -> None:
        self._ahead.__exit__(*ended)
        self._stack.close()

    @property
    def window_elems(self) -> int:
        """Elements of a window of one expert, where rows need not stay whole."""
        return self._length(1, 1)

    def deltas(
        self,
        expert: TensorView,
        base: TensorView,
        work: Callable[[DeltaWindow], T],
        *,
        row_elems: int = 1,
        only: int | None = None,
    ) -> Iterator[T]:
        """`work(window)` for every window of an expert's tensor, in order; some run ahead.

        Windows hold whole rows of `row_elems`. `only`: the one window of that number. Raises
        CheckpointChangedError if a file ends early.
        """
        family = Family((expert,), base)
        length = self._length(1, row_elems)
        jobs = self._family_jobs(family, lambda _, w: work(w), length, only)
        for (of_window,) in self._ahead.results(jobs):
            yield of_window
        self._finish()

    def families(
        self,
        families: Sequence[Family],
        work: Callable[[int], Callable[[int, DeltaWindow], T]],
    ) -> Iterator[tuple[int, list[T]]]:
        """`work(family number)(expert number, window)` for all windows of all experts.

        Whole tensors are not verified: their analysis takes their segments. Of coded ones the
        stored tensors are, and it takes those of the values.
        Yields (family number, what `work` gave per expert) in order; a family without elements has
        one empty window. The base is read once per window. A window's `delta` is valid inside
        `work` only, its raw bytes until the next windows are taken; `n` is 0 beyond a tensor's end.
        """

        under_way: deque[int] = deque()

        def jobs() -> Iterator[Job[list[T]]]:
            for number, family in enumerate(families):
                parts = self._family_jobs(family, work(number), WINDOW_ELEMS, None, is_taken=True)
                for job in parts:
                    under_way.append(number)
                    yield job

        self._expect(v for f in families for v in (*f.experts, f.base))
        at = 0
        for by_expert in self._ahead.results(jobs()):
            number = under_way.popleft()
            if number != at:
                self._finish()
            at = number
            yield number, by_expert
        if families:
            self._finish()

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
        self._begin()
        checks = [self._check(v) for v in experts]
        base_check = self._check(base) if base else None
        self._ahead.load_torch()
        import torch

        def run(start: int, stop: int, buffers: Buffers) -> T:
            nbytes, base_part = 0, None
            table = torch.from_numpy(buffers.rows(len(experts) + 1, stop - start))
            rows, base_values = table[:-1], table[-1]
            if base is not None:
                raw = buffers.bytes(len(experts), (stop - start) * itemsize(base.dtype))
                base_row = BaseRow(self._reader, base, raw, base_update, base_check)
                base_row.fetch(start, stop)
                base_part = base_row.values(base_values)
                nbytes += len(raw)
            helpers = zip(updates, checks, strict=True)
            for i, (view, both) in enumerate(zip(experts, helpers, strict=True)):
                raw = buffers.bytes(i, (stop - start) * itemsize(view.dtype))
                row = ExpertRow(self._reader, view, ((0, view.numel),), raw, *both)
                row.fetch(start, stop)
                (row.delta if as_delta else row.value)(rows[i], base_part)
                nbytes += len(raw) if view.stored else 0
            return work(GroupWindow(start, base_part, rows, nbytes))

        length = self._length(len(experts), row_elems)
        views = (*experts, *([base] if base else ()))
        yield from self._ahead.results(self._jobs(views, numel, length, run, only))
        self._finish()

    def verify_unchanged(self) -> None:
        """Raise CheckpointChangedError if a file was replaced; at the end of every pass."""
        for reader in self._readers:
            reader.verify_unchanged()

    def _finish(self) -> None:
        """Verify the segments of the oldest tensor that were read in part, lest they pile up."""
        if self._known is not None:
            self._verifiers.popleft().finish()

    def _begin(self) -> None:
        """Verify what is read of another tensor, or family of them, from now on."""
        if self._known is not None:
            self._verifiers.append(Verifiers(self._reader, self._known))

    def _expect(self, views: Iterable[TensorView]) -> None:
        """Tell sources that fetch ahead of the tensors that views read."""
        wanted: dict[int, list[TensorEntry]] = {}
        for part in (part for view in views for part in parts_of(view)):
            wanted.setdefault(part.source, []).append(part.entry)
        for number, entries in wanted.items():
            self._readers[number].expect(entries)

    def _check(self, view: TensorView, *, is_taken: bool = False) -> Verify | None:
        """What verifies a view; with `is_taken`, its segments are taken meanwhile."""
        if self._known is None or not view.stored:
            return None
        if not is_taken:
            return self._verifiers[-1].of_view(view)
        if view.is_made:
            self._verifiers[-1].of_stored(view.stored[0])
        return None

    def _reader(self, source: int) -> BlockReader:
        return self._readers[source]

    def _update(self, view: TensorView) -> AdapterUpdate | None:
        return open_update(self._reader, view.low_rank, self._known)

    def _length(self, n_experts: int, row_elems: int) -> int:
        """Elements of a window: about as many bytes for any number of experts, in whole rows."""
        elems = max(CHUNK_ELEMS, WINDOW_ELEMS // max(1, n_experts))
        return max(1, elems // row_elems) * row_elems

    def _family_jobs(
        self,
        family: Family,
        work: Callable[[int, DeltaWindow], T],
        length: int,
        only: int | None,
        *,
        is_taken: bool = False,
    ) -> Iterator[Job[list[T]]]:
        updates = [self._update(v) for v in family.experts]
        base, base_update = family.base, self._update(family.base)
        needs_base = any(v.delta_needs_base for v in family.experts)
        self._begin()
        checks = [self._check(v, is_taken=is_taken and v.is_plain) for v in family.experts]
        is_base_taken = is_taken and family.hashed_with is not None
        base_check = self._check(base, is_taken=is_base_taken) if needs_base else None

        def run(start: int, stop: int, buffers: Buffers) -> list[T]:
            raw_b = buffers.bytes(len(updates), (stop - start) * itemsize(base.dtype))
            row = BaseRow(self._reader, base, raw_b, base_update, base_check)
            base_row = row if needs_base else None
            if base_row is not None:
                base_row.fetch(start, stop)
            delta, values = buffers.rows(2, _padded(stop - start))

            @cache
            def base_values() -> torch.Tensor:
                import torch

                return row.values(torch.from_numpy(values[: stop - start]))

            at = _Place(start, stop, base_row, delta, base_values)
            helpers = zip(updates, checks, strict=True)
            return [
                work(i, self._delta(view, *both, at, buffers, i, base, base_update))
                for i, (view, both) in enumerate(zip(family.experts, helpers, strict=True))
            ]

        numel = max(v.numel for v in family.experts)
        views = (*family.experts, *([base] if needs_base else ()))
        return self._jobs(views, numel, length, run, only)

    def _jobs(
        self,
        views: Sequence[TensorView],
        numel: int,
        length: int,
        run: Callable[[int, int, Buffers], T],
        only: int | None,
    ) -> Iterator[Job[T]]:
        """One job per window of a tensor, in order."""
        starts = range(0, max(1, numel), length) if only is None else [only * length]
        for start in starts:
            stop = min(numel, start + length)

            def of(buffers: Buffers, start: int = start, stop: int = stop) -> T:
                return run(start, stop, buffers)

            def hint(start: int = start, stop: int = stop) -> None:
                for view in views:
                    if view.stored and start < min(stop, view.numel):
                        announce_stored(self._reader, view, start, min(stop, view.numel))

            yield Job(of, hint)

    def _delta(
        self,
        expert: TensorView,
        update: AdapterUpdate | None,
        check: Verify | None,
        at: _Place,
        buffers: Buffers,
        number: int,
        base: TensorView,
        base_update: AdapterUpdate | None,
    ) -> DeltaWindow:
        stop = max(at.start, min(at.stop, expert.numel))
        n = stop - at.start
        raw = buffers.bytes(number, n * itemsize(expert.dtype) if expert.stored else 0)
        row = ExpertRow(self._reader, expert, ((0, expert.numel),), raw, update, check)
        row.fetch(at.start, stop)
        base_row = at.base_row if expert.delta_needs_base else None
        raw_b = base_row.raw[: n * itemsize(base.dtype)] if base_row else raw[:0]
        plain = base_row is not None and (update, base_update) == (None, None)
        dtype = expert.dtype if plain and expert.dtype == base.dtype else None

        def make() -> F32Array:
            if dtype == "F32":
                delta = at.delta[: _padded(n)]
                subtract(raw.view(np.float32), raw_b.view(np.float32), delta[:n])
                delta[n:] = 0
                return delta
            self._ahead.load_torch()
            import torch

            delta = at.delta[: _padded(n)]
            delta[n:] = 0
            if n:
                row.delta(torch.from_numpy(delta[:n]), at.base_values()[:n] if base_row else None)
            return delta

        return DeltaWindow(at.start, n, raw.data, raw_b.data, dtype, make)


class _Place(NamedTuple):
    """Where a window lies, the base's part of it, and room for one δ after the other.

    `base_values` gives [n] float32 of the base, converted when first asked for.
    """

    start: int
    stop: int
    base_row: BaseRow | None
    delta: F32Array
    base_values: Callable[[], torch.Tensor]


def _padded(n: int) -> int:
    return -(-n // CHUNK_ELEMS) * CHUNK_ELEMS
