"""What one input of a merge gets from a pack: chunks, or the parts of them that a window is about.

A frame is read once. Where a window ends inside a chunk, its frames wait for the windows beside.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import attrgetter

import numpy as np

from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.codec import BITS_OF, Floats, decode_approximate, decode_exact
from mergepipe_pipeline.packs.exact import Bits
from mergepipe_pipeline.packs.reader import PackReader
from mergepipe_pipeline.spec.pack import CHUNK_ELEMS, TIERS_OF, Level, PackedInput, PackedTensor

_STOP = attrgetter("stop_elem")
Frames = tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Elements [start, stop) of a tensor, of one chunk, as they were read.

    `frames` are those of the tiers of `level`, of the whole chunk; `root` is the pack's folder.
    """

    root: str
    tensor: PackedTensor
    level: Level
    start_elem: int
    stop_elem: int
    frames: Frames

    @property
    def gives_bits(self) -> bool:
        """Whether it gives elements as the expert stores them; else δ̂."""
        return self.level in ("X20", "X")

    @property
    def is_expert(self) -> bool:
        """Whether all bits are the expert's; of X20, some are the base's."""
        return self.level == "X"

    def fill(self, out: memoryview, base: memoryview) -> None:
        """Fill `out` with the stored bytes of the elements, given the base's.

        Raises CorruptionError.
        """
        kind, (x20, *x) = BITS_OF[self.tensor.dtype], self.frames
        mine, theirs = np.frombuffer(out, kind), np.frombuffer(base, kind)
        if self._is_whole:
            self._exact(x20, x, theirs, mine)
            return
        # Other elements of the chunk come out wrong, and nobody looks at them.
        padded, whole = np.zeros(self._n, kind), np.empty(self._n, kind)
        padded[self._inside] = theirs
        self._exact(x20, x, padded, whole)
        mine[:] = whole[self._inside]

    def delta(self, out: Floats) -> None:
        """Fill `out` [stop − start] with δ̂. Raises CorruptionError."""
        whole = out if self._is_whole else np.empty(self._n, np.float32)
        try:
            decode_approximate(self.frames, self.tensor.unit, whole)
        except CorruptionError as error:
            raise self._named(error) from None
        if whole is not out:
            out[:] = whole[self._inside]

    def _exact(self, x20: memoryview, x: list[memoryview], base: Bits, out: Bits) -> None:
        try:
            decode_exact(x20, x[0] if x else None, base, out)
        except CorruptionError as error:
            raise self._named(error) from None

    @property
    def _chunk(self) -> int:
        return self.start_elem // CHUNK_ELEMS

    @property
    def _n(self) -> int:
        """Elements of the chunk."""
        return _length(self.tensor, self._chunk)

    @property
    def _is_whole(self) -> bool:
        return self.stop_elem - self.start_elem == self._n

    @property
    def _inside(self) -> slice:
        first = self._chunk * CHUNK_ELEMS
        return slice(self.start_elem - first, self.stop_elem - first)

    def _named(self, error: CorruptionError) -> CorruptionError:
        error.where = (
            f"{self.root}, level {self.level}, tensor {self.tensor.name}, chunk {self._chunk}"
        )
        return error


class PackedElements:
    """One input's elements in a pack, for all windows of its tensor. Safe for several threads."""

    def __init__(self, reader: PackReader, packed: PackedInput, digest: str) -> None:
        """`digest` is of the expert's tensor. Raises CorruptionError for another pack's tensor."""
        self._reader, self._ranges = reader, packed.ranges
        self._tensor = reader.tensor(packed.tensor)
        self._numel = prod(self._tensor.shape)
        found, planned = (self._tensor.digest, self._tensor.unit), (digest, packed.unit)
        if found != planned:
            raise CorruptionError(
                "A pack does not hold what was planned",
                where=f"tensor {packed.tensor}",
                expected="content {}, unit {}".format(*planned),
                found="content {}, unit {}".format(*found),
                next_step="run the same command again: it plans anew",
            )
        self._lock = threading.Lock()
        #: Chunks of which some elements were asked for: frames, and how many elements are to come.
        self._begun: dict[int, tuple[Frames, int]] = {}

    def fetch(self, start_elem: int, stop_elem: int) -> list[ChunkPart]:
        """Read what the plan takes from the pack of elements [start, stop), in order.

        Raises BudgetError, CorruptionError.
        """
        return [
            part
            for level, start, stop in self._within(start_elem, stop_elem)
            for a, b in self._pieces(start, stop)
            for part in self._fetched(level, a, b)
        ]

    def announce(self, start_elem: int, stop_elem: int) -> None:
        """Say that elements [start, stop) will be fetched soon."""
        for level, start, stop in self._within(start_elem, stop_elem):
            for tier in TIERS_OF[level]:
                self._reader.will_need(self._tensor, tier, *_chunks(start, stop))

    def _within(self, start_elem: int, stop_elem: int) -> Iterator[tuple[Level, int, int]]:
        for number in range(bisect_right(self._ranges, start_elem, key=_STOP), len(self._ranges)):
            r = self._ranges[number]
            if r.start_elem >= stop_elem:
                break
            yield r.level, max(start_elem, r.start_elem), min(stop_elem, r.stop_elem)

    def _pieces(self, start_elem: int, stop_elem: int) -> Iterator[tuple[int, int]]:
        """[start, stop) cut into whole chunks that lie together, and parts of a chunk."""
        _, stop = _chunks(start_elem, stop_elem)
        is_end = stop_elem in (stop * CHUNK_ELEMS, self._numel)
        after = min(stop_elem, -(-start_elem // CHUNK_ELEMS) * CHUNK_ELEMS)
        before = stop_elem if is_end else max(start_elem, (stop - 1) * CHUNK_ELEMS)
        return pairwise(sorted({start_elem, after, before, stop_elem}))

    def _fetched(self, level: Level, start_elem: int, stop_elem: int) -> Iterator[ChunkPart]:
        first, stop = _chunks(start_elem, stop_elem)
        n = stop_elem - start_elem
        if n < _length(self._tensor, first):
            frames = [self._shared(level, first, n)]
        else:
            frames = self._read(level, first, stop)
        for chunk, of in enumerate(frames, first):
            a = max(start_elem, chunk * CHUNK_ELEMS)
            b = min(stop_elem, (chunk + 1) * CHUNK_ELEMS)
            yield ChunkPart(self._reader.root, self._tensor, level, a, b, of)

    def _shared(self, level: Level, chunk: int, n: int) -> Frames:
        """The frames of a chunk of which n elements are asked for, and the others by others."""
        with self._lock:
            frames, left = self._begun.pop(chunk, (None, _length(self._tensor, chunk)))
            if frames is None:
                (frames,) = self._read(level, chunk, chunk + 1)
            if left > n:
                self._begun[chunk] = frames, left - n
            return frames

    def _read(self, level: Level, first: int, stop: int) -> list[Frames]:
        tiers = (self._reader.read(self._tensor, t, first, stop) for t in TIERS_OF[level])
        return list(zip(*tiers, strict=True))


def _chunks(start_elem: int, stop_elem: int) -> tuple[int, int]:
    """The chunks that elements [start, stop) lie in."""
    return start_elem // CHUNK_ELEMS, -(-stop_elem // CHUNK_ELEMS)


def _length(tensor: PackedTensor, chunk: int) -> int:
    return min(CHUNK_ELEMS, prod(tensor.shape) - chunk * CHUNK_ELEMS)
