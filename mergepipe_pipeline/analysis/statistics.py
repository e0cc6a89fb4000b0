"""Statistics of experts against their base: per tensor and per block, in one pass over all.

The base is read once for all experts of a pass. Sums are taken over fixed chunks and added exactly,
so tensor-level figures do not depend on the block grid, and nothing depends on threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.analysis.kernels import (
    describe,
    describe_bfloat16,
    sample_elems,
)
from mergepipe_pipeline.analysis.magnitudes import BINS, room_for
from mergepipe_pipeline.analysis.stream import WINDOW_ELEMS, DeltaWindow, Family, WindowReader
from mergepipe_pipeline.arrays import F32Array, F64Array, I64Array, U16Array
from mergepipe_pipeline.digest import segment_digests, sha256_hex
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.segments import KnownSegments, Segments, levels_for
from mergepipe_pipeline.domain.stats import (
    SAMPLE_WIDTH,
    Magnitudes,
    TensorStats,
    narrowed,
    widened,
)
from mergepipe_pipeline.domain.view import TensorView, moved
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.operators.kernels.kept_l1 import CHUNK_ELEMS

Pair = tuple[str, str]
S = TypeVar("S", bound=np.generic)


@dataclass
class _Figures:
    """The figures of one window, per chunk as `kernels.describe` says.

    `segments` are the digests of its bytes and of the base's, one per level; empty where those of
    the tensor are not taken.
    """

    window: DeltaWindow
    sums: F64Array
    peaks: F32Array
    counts: I64Array
    samples: U16Array
    histogram: I64Array
    magnitudes: Magnitudes | None
    segments: tuple[bytes, ...] = ()
    base_segments: tuple[bytes, ...] = ()


def analyze_experts(
    experts: Sequence[tuple[Model, Sequence[Pair]]],
    base: Model,
    grid: BlockGrid,
    *,
    progress: Callable[[int], None] | None = None,
    known: KnownSegments | None = None,
) -> Iterator[list[tuple[int, TensorStats]]]:
    """One pass: for each tensor of the base, the statistics of the experts that have it.

    `experts` bring their pairs of (own tensor, base's tensor), which have equal shapes; the base's
    tensor is read once for all that pair with it. Yields expert numbers with statistics, a tensor
    of the base at a time, so that a caller may keep what is done. `progress` is called with expert
    bytes. Segments of whole and of coded tensors are taken; others are verified against `known`
    segments of the experts' checkpoints and then the base's. Raises CheckpointChangedError if a
    file changes meanwhile, CorruptionError.
    """
    offsets: list[int] = []
    checkpoints: list[Checkpoint] = []
    for model, _ in experts:
        offsets.append(len(checkpoints))
        checkpoints += model.checkpoints
    base_offset = len(checkpoints)
    checkpoints += base.checkpoints
    members = _by_base_tensor(experts)
    families = [
        Family(
            tuple(moved(experts[i][0].views[name], offsets[i]) for i, name in of_tensor),
            moved(base.views[base_name], base_offset),
        )
        for base_name, of_tensor in members.items()
    ]
    with WindowReader(checkpoints, known) as reader:
        whose = [[i for i, _ in of_tensor] for of_tensor in members.values()]
        for number, stats in _streamed(reader, families, grid, progress):
            reader.verify_unchanged()
            yield list(zip(whose[number], stats, strict=True))


def _by_base_tensor(
    experts: Sequence[tuple[Model, Sequence[Pair]]],
) -> dict[str, list[tuple[int, str]]]:
    members: dict[str, list[tuple[int, str]]] = {}
    for i, (_, pairs) in enumerate(experts):
        for name, base_name in pairs:
            members.setdefault(base_name, []).append((i, name))
    return members


def _streamed(
    reader: WindowReader,
    families: Sequence[Family],
    grid: BlockGrid,
    progress: Callable[[int], None] | None,
) -> Iterator[tuple[int, list[TensorStats]]]:
    """(family number, statistics per expert), in order; windows of all run as one stream."""
    begun: dict[int, _Gathered] = {}

    def work(number: int) -> Callable[[int, DeltaWindow], _Figures]:
        gathered = begun.setdefault(number, _Gathered(families[number], grid))
        return gathered.describe

    at: int | None = None
    for number, figures in reader.families(families, work):
        if at is not None and at != number:
            yield at, begun.pop(at).stats()
        at = number
        begun[number].add(figures)
        if progress:
            progress(sum(len(f.window.expert_raw) for f in figures))
    if at is not None:
        yield at, begun.pop(at).stats()


def _key(base_tensor: str) -> np.uint64:
    """The stream that draws samples of a tensor of the base: equal for all experts."""
    return np.uint64(int(sha256_hex(f"sketch:{base_tensor}".encode())[:16], 16))


class _Gathered:
    """Gathers the windows of one family."""

    def __init__(self, family: Family, grid: BlockGrid) -> None:
        self._base, self._grid, self._key = family.base, grid, _key(family.base.name)
        self._tables = [_Table(view, family.base, grid) for view in family.experts]
        self._levels = levels_for(grid.block_elems)
        self._base_segments: list[tuple[bytes, ...]] = []
        self._experts = family.experts
        self._with_base = family.hashed_with

    def describe(self, number: int, window: DeltaWindow) -> _Figures:
        """The figures of a window of one expert, in any thread, and its bytes' digests."""
        figures = _describe(window, self._key, self._grid, self._base.numel)
        if self._experts[number].is_plain:
            figures.segments = self._digested(window.expert_raw, self._experts[number])
        if number == self._with_base:
            figures.base_segments = self._digested(window.base_raw, self._base)
        return figures

    def _digested(self, raw: memoryview, view: TensorView) -> tuple[bytes, ...]:
        """Digests per level of the bytes of a window, which begins with a segment."""
        sizes = (n * itemsize(view.dtype) for n in self._levels)
        return tuple(segment_digests(raw, size, is_made=view.is_made) for size in sizes)

    def add(self, by_expert: Sequence[_Figures]) -> None:
        """Take in the next window."""
        for table, figures in zip(self._tables, by_expert, strict=True):
            table.add(figures)
        if self._with_base is not None:
            self._base_segments.append(by_expert[self._with_base].base_segments)

    def stats(self) -> list[TensorStats]:
        """The statistics of each expert's tensor."""
        base = self._joined(self._base_segments) if self._with_base is not None else ()
        return [
            table.stats(self._joined(table.segments) if view.is_plain else (), base)
            for table, view in zip(self._tables, self._experts, strict=True)
        ]

    def _joined(self, windows: Sequence[tuple[bytes, ...]]) -> tuple[Segments, ...]:
        """Per level, those of all windows."""
        joined = (b"".join(parts) for parts in zip(*windows, strict=True))
        return tuple(Segments(n, part) for n, part in zip(self._levels, joined, strict=True))


class _Table:
    """Gathers the windows of one expert's tensor."""

    def __init__(self, view: TensorView, base: TensorView, grid: BlockGrid) -> None:
        self._view, self._base, self._grid = view, base, grid
        self._histogram: I64Array | None = None
        self._sums, self._counts = [np.zeros((0, 2))], [np.zeros(0, np.int64)]
        self._peaks = [np.zeros(0, np.float32)]
        self._samples = [np.zeros((0, SAMPLE_WIDTH), np.uint16)]
        self._magnitudes: list[Magnitudes] | None = []
        self.segments: list[tuple[bytes, ...]] = []

    def add(self, figures: _Figures) -> None:
        """Take in the next window."""
        if self._histogram is None:  # families wait in line, and this is most of what they hold
            self._histogram = np.zeros(BINS, dtype=np.int64)
        self._histogram += figures.histogram
        # Only figures may pile up: bytes and tables are the next window's.
        self._sums.append(figures.sums)
        self._peaks.append(figures.peaks)
        self._counts.append(figures.counts)
        self._samples.append(figures.samples)
        self.segments.append(figures.segments)
        if figures.magnitudes is None:
            self._magnitudes = None
        elif self._magnitudes is not None:
            self._magnitudes.append(figures.magnitudes)

    def stats(
        self, segments: tuple[Segments, ...], base_segments: tuple[Segments, ...]
    ) -> TensorStats:
        """The statistics of the whole tensor; the segments are empty where none were taken."""
        view, grid = self._view, self._grid
        sums, counts = np.concatenate(self._sums), np.concatenate(self._counts)
        peaks = np.concatenate(self._peaks)
        histogram = np.zeros(0, np.int64) if self._histogram is None else self._histogram
        occupied, listed = np.flatnonzero(histogram), self._magnitudes
        return TensorStats(
            tensor=view.name,
            base_tensor=self._base.name,
            digest=segments[0].content if segments and view.whole else "",
            base_digest=base_segments[0].content if base_segments and self._base.whole else "",
            dtype=view.dtype,
            base_dtype=self._base.dtype,
            numel=view.numel,
            l1=math.fsum(sums[:, 0].tolist()),
            l2sq=math.fsum(sums[:, 1].tolist()),
            max_abs=float(peaks.max(initial=0)),
            nonzero=int(counts.sum()),
            hist_bins=occupied.astype(np.uint16),
            hist_counts=histogram[occupied],
            block_l2sq=_per_block(sums[:, 1], grid, np.add),
            block_nonzero=_per_block(counts, grid, np.add),
            block_max_abs=_per_block(peaks, grid, np.maximum),
            block_sample=np.concatenate(self._samples),
            block_magnitudes=None if listed is None else Magnitudes.joined(listed),
            segments=segments,
            base_segments=base_segments,
        )


def _describe(window: DeltaWindow, key: np.uint64, grid: BlockGrid, numel: int) -> _Figures:
    """The figures of a window of a tensor that differs from one of `numel` elements."""
    chunks = -(-window.n // CHUNK_ELEMS)
    sums = np.zeros((chunks, 2))
    peaks = np.zeros(chunks, dtype=np.float32)
    counts = np.zeros(chunks, dtype=np.int64)
    histogram = np.zeros(BINS, dtype=np.int64)
    room = room_for(window.n, grid)
    into = (sums, peaks, counts, histogram, grid.block_elems, room)
    at = sample_elems(key, grid, window.start_elem, min(numel, window.start_elem + WINDOW_ELEMS))
    at = at[: -(-window.n // grid.block_elems)] - window.start_elem
    samples = np.zeros(at.shape, np.float32)
    here = at < window.n
    if window.dtype == "BF16":
        expert = np.frombuffer(window.expert_raw, np.uint16)
        base = np.frombuffer(window.base_raw, np.uint16)
        describe_bfloat16(expert, base, *into)
        samples[here] = widened(expert[at[here]]) - widened(base[at[here]])
    else:
        describe(window.delta, *into)
        samples[here] = window.delta[at[here]]
    histogram[0] -= chunks * CHUNK_ELEMS - window.n  # the padding
    return _Figures(window, sums, peaks, counts, narrowed(samples), histogram, room.listed())


def _per_block(chunks: npt.NDArray[S], grid: BlockGrid, combine: np.ufunc) -> npt.NDArray[S]:
    """Figures of chunks put together per block, along the first axis."""
    if not len(chunks):
        return chunks
    starts = np.arange(0, len(chunks), grid.block_elems // CHUNK_ELEMS)
    blocks: npt.NDArray[S] = combine.reduceat(chunks, starts, axis=0)
    return blocks
