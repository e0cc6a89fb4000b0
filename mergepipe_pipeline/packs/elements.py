"""The elements that one input of a merge takes from a pack: whole chunks, or a part of one.

No frame is asked for but those of the plan's ranges, and each is read once. Where a window ends
inside a chunk, its frames wait for the windows beside.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, F32Array, I16Array
from mergepipe_pipeline.checkpoints.reader import Tally
from mergepipe_pipeline.domain.pack import (
    CHUNK_ELEMS,
    EXACT,
    FACTORED,
    STEPPED,
    TIERS,
    TIERS_OF,
    Level,
    PackedInput,
    PackedTensor,
    PackSource,
)
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.operators.kernels.bits import times
from mergepipe_pipeline.packs.basis import predicted, products_in
from mergepipe_pipeline.packs.codec import BITS_OF, decode_bits, decode_numbers
from mergepipe_pipeline.packs.exact import Prediction
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.frames import Frames, Places
from mergepipe_pipeline.packs.product import Product
from mergepipe_pipeline.packs.store import open_pack
from mergepipe_pipeline.packs.ternary import step_of
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.storage.source import Reading

_STOP = attrgetter("stop_elem")
#: Fills a buffer with the stored bytes of the base's elements [start, stop).
ReadBase = Callable[[int, int, memoryview], None]


class _Piece(NamedTuple):
    """Elements of one level: whole chunks, or a part of one."""

    level: Level
    start_elem: int
    stop_elem: int
    length: float
    is_part: bool

    @property
    def joins(self) -> bool:
        """Whether it is decoded together with neighbours."""
        return not self.is_part and self.level not in EXACT


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Elements [start, stop) of a tensor, as they were read: of whole chunks, or of one chunk.

    `levels` are those of the chunks that they lie in: one exact level, or any approximate ones.
    `product` is of the tensor's factors; δ̂ is read `length` times as long. `frames` are those of
    the chunks. `root` is the pack's folder. `base` has the stored bytes of the base's chunk, where
    elements of a part of one are exact: how a chunk is coded follows from all of them.
    """

    root: str
    tensor: PackedTensor
    levels: Sequence[Level]
    start_elem: int
    stop_elem: int
    frames: Frames
    base: memoryview | None = None
    product: Product | None = None
    length: float = 1.0

    @property
    def gives_bits(self) -> bool:
        """Whether it gives elements as the expert stores them; else δ̂."""
        return self.levels[0] in EXACT

    @property
    def is_expert(self) -> bool:
        """Whether all bits are the expert's; of X20, some are the base's."""
        return self.levels[0] == "X"

    @property
    def is_predicted(self) -> bool:
        """Whether its bits are distances to what factors make of the base."""
        return self.is_expert and self.product is not None

    @property
    def is_whole(self) -> bool:
        """Whether all elements of the chunks are asked for."""
        return self.stop_elem - self.start_elem == self._n

    @property
    def places(self) -> Places:
        """Where the chunks begin, counted from the first of them, and their elements."""
        return Places.one_after_another(self._n)

    @property
    def step(self) -> np.float32:
        """What `numbers` are multiplied by."""
        return np.float32(step_of(self.tensor.unit) * self.length)

    def fill(self, out: memoryview, base: memoryview) -> None:
        """Fill `out` with the stored bytes of the elements, given the base's of the same.

        Raises CorruptionError.
        """
        kind = BITS_OF[self.tensor.dtype]
        expert_bits, base_bits = np.frombuffer(out, kind), np.frombuffer(base, kind)
        whole = expert_bits
        if not self.is_whole:
            assert self.base is not None
            base_bits, whole = np.frombuffer(self.base, kind), np.empty(self._n, kind)
        start_elem = self._first * CHUNK_ELEMS
        told = predicted(self.product, self.tensor, base_bits, start_elem)

        def decode(chunks: slice, elems: slice) -> None:
            near = told and Prediction(told.bits[elems], told.is_below[elems])
            decode_bits(self.frames[chunks], base_bits[elems], whole[elems], near)

        self._named(decode)
        if not self.is_whole:
            expert_bits[:] = whole[self._inside]

    def delta(self, out: F32Array) -> None:
        """Fill `out` [stop − start] with δ̂. Raises CorruptionError."""
        numbers = np.empty(len(out), np.int16)
        self.numbers(numbers)
        times(numbers, self.step, out)

    def numbers(self, out: I16Array) -> None:
        """Fill `out` [stop − start] with δ̂ in steps. Raises CorruptionError."""
        whole = out if self.is_whole else np.empty(self._n, np.int16)

        def decode(chunks: slice, elems: slice) -> None:
            decode_numbers(self.frames[chunks], self.n_stepped[chunks], whole[elems])

        self._named(decode)
        if whole is not out:
            out[:] = whole[self._inside]
        self.add_product(out)

    @property
    def n_stepped(self) -> list[int]:
        """How many of the stepped tiers each chunk is read with."""
        return [sum(tier in STEPPED for tier in TIERS_OF[level]) for level in self.levels]

    def add_product(self, numbers: I16Array) -> None:
        """Add what the tensor's factors give to `numbers` [stop − start]."""
        if self.product is not None:
            self.product.add_to(numbers, self.start_elem, step_of(self.tensor.unit))

    def _named(self, decode: Callable[[slice, slice], None]) -> None:
        """Decode all chunks; if that fails, say in the error which one cannot be decoded.

        `decode` gets which chunks, and which elements they are.
        """
        try:
            decode(slice(None), slice(None))
        except CorruptionError:
            for number, level in enumerate(self.levels):
                elems = slice(number * CHUNK_ELEMS, (number + 1) * CHUNK_ELEMS)
                try:
                    decode(slice(number, number + 1), elems)
                except CorruptionError as error:
                    tensor, chunk = self.tensor.name, self._first + number
                    error.where = f"{self.root}, level {level}, tensor {tensor}, chunk {chunk}"
                    raise
            raise

    @property
    def _first(self) -> int:
        """The first chunk."""
        return self.start_elem // CHUNK_ELEMS

    @property
    def _n(self) -> int:
        """Elements of the chunks."""
        stop = (self._first + len(self.levels)) * CHUNK_ELEMS
        return min(stop, prod(self.tensor.shape)) - self._first * CHUNK_ELEMS

    @property
    def _inside(self) -> slice:
        first = self._first * CHUNK_ELEMS
        return slice(self.start_elem - first, self.stop_elem - first)


class WantedFrames(NamedTuple):
    """The frames of a tensor that a plan takes of a pack: `wanted` [tiers, chunks] of `files`."""

    files: FrameFiles
    tensor: PackedTensor
    wanted: BoolArray
    tally: Tally


class PackReader:
    """The tensors of one pack and the `files` of its frames, which it closes as a context manager.

    What is read counts into `tally`, which others may share.
    """

    def __init__(self, source: PackSource, tally: Tally, reading: Reading = "ahead") -> None:
        """Raises DamagedPackError for a pack that is not as it was written."""
        self.root, self.tally = source.root, tally
        self.tensors = open_pack(Path(source.root)).tensors
        self.files = FrameFiles(Path(source.root), reading)

    def __enter__(self) -> PackReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.files.__exit__(*error)


class PackedElements:
    """One input's elements in a pack, for all windows of its tensor. Safe for several threads."""

    def __init__(
        self, reader: PackReader, packed: PackedInput, digest: str, read_base: ReadBase
    ) -> None:
        """`digest` is of the expert's tensor. Raises CorruptionError for another pack's tensor."""
        self._reader, self._ranges, self._read_base = reader, packed.ranges, read_base
        self._tensor = reader.tensors[packed.tensor]
        self._numel = prod(self._tensor.shape)
        stored = self._tensor.digest, self._tensor.unit, self._tensor.factors
        planned = digest, packed.unit, packed.factors
        if stored != planned:
            raise CorruptionError(
                "A pack does not hold what was planned",
                where=f"tensor {packed.tensor}",
                expected="content {}, unit {}, factors {}".format(*planned),
                found="content {}, unit {}, factors {}".format(*stored),
                next_step="run the same command again: it plans anew",
            )
        #: By tier and chunk, whether the plan takes the frame.
        self._wanted = np.zeros(self._tensor.nbytes.shape, np.bool_)
        for r in packed.ranges:
            tiers = [TIERS.index(tier) for tier in TIERS_OF[r.level] if tier not in FACTORED]
            self._wanted[tiers, slice(*_chunks(r.start_elem, r.stop_elem))] = True
        self._lock = threading.Lock()
        #: Tiers of factors that are read, and how many of them approximate levels take.
        self._rungs, self._n_near = packed.factor_tiers, len(packed.near_tiers)
        #: What they give approximate levels, and exact ones, once they are read.
        self._products: tuple[Product | None, Product | None] = None, None
        #: Chunks of which only some elements were taken yet: frames, the base's bytes, and how many
        #: elements are missing.
        self._begun: dict[int, tuple[Frames, memoryview | None, int]] = {}

    @property
    def frames(self) -> WantedFrames:
        """The frames that the plan takes of the whole tensor."""
        return WantedFrames(self._reader.files, self._tensor, self._wanted, self._reader.tally)

    def chunks_in(self, start_elem: int, stop_elem: int) -> tuple[int, int]:
        """The chunks [first, stop) whose elements all lie in [start, stop)."""
        first = -(-start_elem // CHUNK_ELEMS)
        is_end = stop_elem >= self._numel
        last = _chunks(0, self._numel)[1] if is_end else stop_elem // CHUNK_ELEMS
        return first, max(first, last)

    def fetch(self, start_elem: int, stop_elem: int, buffer: PageBuffer) -> list[PackedPart]:
        """Read the elements in [start, stop) that the plan takes from the pack, in order.

        Their frames lie in `buffer`, until it is cleared. Raises DamagedPackError.
        """
        first, stop = self.chunks_in(start_elem, stop_elem)
        whole = self._read(first, stop, buffer) if first < stop else None
        return self.parts(start_elem, stop_elem, whole)

    def parts(self, start_elem: int, stop_elem: int, whole: Frames | None) -> list[PackedPart]:
        """The result of `fetch`; `whole` are the frames of the chunks that lie in [start, stop)."""
        first = -(-start_elem // CHUNK_ELEMS)
        parts = []
        for pieces in _joined(list(self._pieces(start_elem, min(stop_elem, self._numel)))):
            edges = pieces[0].start_elem, pieces[-1].stop_elem
            a, b = _chunks(*edges)
            base = None
            if whole is None or pieces[0].is_part:
                frames, base = self._shared(pieces[0])
            else:
                frames = whole[a - first : b - first]
            levels = [p.level for p in pieces for _ in range(*_chunks(p.start_elem, p.stop_elem))]
            near, exact = self._factors()
            product = exact if levels[0] == "X" else None if levels[0] == "X20" else near
            of = self._reader.root, self._tensor, levels
            parts.append(PackedPart(*of, *edges, frames, base, product, pieces[0].length))
        return parts

    def _factors(self) -> tuple[Product | None, Product | None]:
        """The products of the tensor's factors, which are read once."""
        with self._lock:
            if self._rungs and self._tensor.factors:
                began, tally = time.perf_counter(), self._reader.tally
                counts = self._n_near, len(self._rungs)
                near, exact = products_in(self._reader.files, self._tensor, counts)
                self._products = near, exact
                tally.read_s += time.perf_counter() - began
                rows = [TIERS.index(tier) for tier in self._rungs]
                tally.nbytes += int(self._tensor.nbytes[rows, 0].sum())
            self._rungs = ()
            return self._products

    def _pieces(self, start_elem: int, stop_elem: int) -> Iterator[_Piece]:
        """Elements in [start, stop) from the pack: whole chunks of a level, and parts of one."""
        for number in range(bisect_right(self._ranges, start_elem, key=_STOP), len(self._ranges)):
            r = self._ranges[number]
            if r.start_elem >= stop_elem:
                break
            start, stop = max(start_elem, r.start_elem), min(stop_elem, r.stop_elem)
            last = _chunks(start, stop)[1]
            is_end = stop in (last * CHUNK_ELEMS, self._numel)
            after = min(stop, -(-start // CHUNK_ELEMS) * CHUNK_ELEMS)
            before = stop if is_end else max(start, (last - 1) * CHUNK_ELEMS)
            for a, b in pairwise(sorted({start, after, before, stop})):
                is_part = b - a < _length(self._tensor, a // CHUNK_ELEMS)
                yield _Piece(r.level, a, b, r.length, is_part)

    def _shared(self, piece: _Piece) -> tuple[Frames, memoryview | None]:
        """The frames of a chunk that this window shares with its neighbours, and the base's bytes.

        Of the base none for approximate levels.
        """
        n, chunk = piece.stop_elem - piece.start_elem, piece.start_elem // CHUNK_ELEMS
        with self._lock:
            n_elems = _length(self._tensor, chunk)
            frames, base, n_missing = self._begun.pop(chunk, (None, None, n_elems))
            if frames is None:
                frames = self._read(chunk, chunk + 1, PageBuffer())
                if piece.level in EXACT:
                    base = memoryview(bytearray(n_elems * itemsize(self._tensor.dtype)))
                    start_elem = chunk * CHUNK_ELEMS
                    self._read_base(start_elem, start_elem + n_elems, base)
            if n_missing > n:
                self._begun[chunk] = frames, base, n_missing - n
            return frames, base

    def _read(self, first: int, stop: int, buffer: PageBuffer) -> Frames:
        """All frames that the plan takes of chunks [first, stop)."""
        began, tally = time.perf_counter(), self._reader.tally
        frames = self._reader.files.read_wanted(self._tensor, self._wanted, first, stop, buffer)
        tally.read_s += time.perf_counter() - began
        tally.nbytes += int(frames.nbytes.sum())
        return frames


def _joined(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Pieces that are decoded together: whole chunks of δ̂ of one length, side by side."""
    runs: list[list[_Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        beside = last and last.stop_elem == piece.start_elem and last.length == piece.length
        if last and beside and last.joins and piece.joins:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _chunks(start_elem: int, stop_elem: int) -> tuple[int, int]:
    """The chunks that elements [start, stop) lie in."""
    return start_elem // CHUNK_ELEMS, -(-stop_elem // CHUNK_ELEMS)


def _length(tensor: PackedTensor, chunk: int) -> int:
    return min(CHUNK_ELEMS, prod(tensor.shape) - chunk * CHUNK_ELEMS)
