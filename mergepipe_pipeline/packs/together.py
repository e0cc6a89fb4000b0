"""Reads and decodes what all inputs of one output tensor take from packs, in a few calls.

Each call holds the interpreter's lock for a while, for which all other threads wait. Input by
input, a merge of 20 experts of 0.6B from packs held it for 8.6 s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.arrays import I64Array
from mergepipe_pipeline.domain.pack import TIERS
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.codec import decode_bits, decode_numbers
from mergepipe_pipeline.packs.elements import PackedElements, PackedPart, WantedFrames
from mergepipe_pipeline.packs.exact import Bits
from mergepipe_pipeline.packs.frame_files import FrameTable, read_at_once
from mergepipe_pipeline.packs.frames import Frames, Places
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.storage.source import HANDLES

#: Chunks that are decoded at once: what is unpacked of them stays in the cache.
_CHUNKS_AT_ONCE = 64


class PackedInputs:
    """The packed elements of one output tensor's inputs (None: no pack), for all windows.

    Safe for several threads.
    """

    def __init__(self, inputs: Sequence[PackedElements | None]) -> None:
        self._inputs = inputs
        there = [(number, e) for number, e in enumerate(inputs) if e is not None]
        # A thread may hold so many files open.
        most = max(1, HANDLES.share // len(TIERS))
        self._groups = [_Group(there[i : i + most]) for i in range(0, len(there), most)]

    def __getitem__(self, number: int) -> PackedElements | None:
        return self._inputs[number]

    def fetch(
        self, start_elem: int, stop_elem: int, buffer: PageBuffer
    ) -> list[Sequence[PackedPart]]:
        """Per input, as `PackedElements.fetch`."""
        parts_by_input: list[Sequence[PackedPart]] = [()] * len(self._inputs)
        for group in self._groups:
            for number, parts in group.fetch(start_elem, stop_elem, buffer):
                parts_by_input[number] = parts
        return parts_by_input


class _Group:
    """Some inputs, whose frames are read by one call."""

    def __init__(self, numbered: Sequence[tuple[int, PackedElements]]) -> None:
        self._numbered = numbered
        self._all: list[WantedFrames] = [e.frames for _, e in numbered]
        self._counts = [f.wanted.shape[1] for f in self._all]
        # [tiers of all inputs, chunks]; those that a tensor does not have are not wanted.
        shape = len(self._all) * len(TIERS), max(self._counts)
        self._wanted = np.zeros(shape, np.bool_)
        starts = np.zeros((shape[0], shape[1] + 1), np.int64)
        self._table = FrameTable(starts, np.zeros(shape, np.uint32), np.zeros(shape, np.uint64))
        for (_, tensor, wanted, _), n, rows in self._members():
            self._wanted[rows, :n] = wanted
            self._table.starts[rows, : n + 1] = tensor.frame_starts
            self._table.nbytes[rows, :n] = tensor.nbytes
            self._table.checksums[rows, :n] = tensor.checksums

    def fetch(
        self, start_elem: int, stop_elem: int, buffer: PageBuffer
    ) -> Iterator[tuple[int, Sequence[PackedPart]]]:
        """The number of each input, and its parts."""
        chunks = [e.chunks_in(start_elem, stop_elem) for _, e in self._numbered]
        first, stop = chunks[0][0], min(max(self._counts), max(stop for _, stop in chunks))
        frames = self._read(first, stop, [stop for _, stop in chunks], buffer)
        for (number, e), (_, own), (_, _, rows) in zip(
            self._numbered, chunks, self._members(), strict=True
        ):
            if frames is None:  # `fetch` says what is wrong, or reads it by itself
                yield number, e.fetch(start_elem, stop_elem, buffer)
                continue
            whole = None
            if first < own:
                inside = rows, slice(own - first)
                whole = Frames(frames.raw, frames.starts[inside], frames.nbytes[inside])
            yield number, e.parts(start_elem, stop_elem, whole)

    def _read(
        self, first: int, stop: int, stops: Sequence[int], buffer: PageBuffer
    ) -> Frames | None:
        """The frames of chunks [first, stop), [tiers of all, chunks]; None for anything wrong."""
        if first >= stop:
            return None
        began, wanted = time.perf_counter(), self._wanted
        if any(own < min(stop, n) for own, n in zip(stops, self._counts, strict=True)):
            wanted = wanted.copy()  # chunks that the window ends inside of are read by `parts`
            for own, (_, _, rows) in zip(stops, self._members(), strict=True):
                wanted[rows, own:] = False
        attempt = read_at_once(self._lent, self._table, wanted, first, stop, buffer)
        if attempt.unread or not attempt.are_right:
            return None
        tally = self._all[0].tally
        tally.read_s += time.perf_counter() - began
        tally.nbytes += int(attempt.frames.nbytes.sum())
        return attempt.frames

    def _lent(self, number: int) -> AbstractContextManager[tuple[int, bool]]:
        member, tier = divmod(number, len(TIERS))
        return self._all[member].files.lent(tier)

    def _members(self) -> Iterator[tuple[WantedFrames, int, slice]]:
        """Each input's frames, its number of chunks, and its rows of the table."""
        for i, (frames, n) in enumerate(zip(self._all, self._counts, strict=True)):
            yield frames, n, slice(i * len(TIERS), (i + 1) * len(TIERS))


@dataclass(frozen=True, slots=True)
class Placed:
    """A part whose elements go to an array from `start` on; the base's lie from `base_start` on."""

    part: PackedPart
    start: int
    base_start: int


def decode_together(placed: Sequence[Placed], base: Bits, out: Bits) -> None:
    """Put the parts into `out`: the stored bits, or int16 numbers in steps, of those that give δ̂.

    `base` has the base's bits. Raises CorruptionError.
    """
    whole: dict[tuple[int, bool], list[Placed]] = {}
    for p in placed:
        if p.part.is_whole and not p.part.is_predicted:
            whole.setdefault((id(p.part.frames.raw), p.part.gives_bits), []).append(p)
        else:
            _alone(p, base, out)
    for (_, gives_bits), some in whole.items():
        try:
            _decode(some, base, out, gives_bits=gives_bits)
        except CorruptionError:
            for p in some:
                _alone(p, base, out)  # its error names the part
            raise


def _alone(p: Placed, base: Bits, out: Bits) -> None:
    n = p.part.stop_elem - p.part.start_elem
    into = out[p.start : p.start + n]
    if p.part.gives_bits:
        base_elems = base[p.base_start : p.base_start + n]
        p.part.fill(into.view(np.uint8).data, base_elems.view(np.uint8).data)
    else:
        p.part.numbers(into.view(np.int16))


def _decode(placed: Sequence[Placed], base: Bits, out: Bits, *, gives_bits: bool) -> None:
    """Decode parts of whole chunks whose frames lie in one buffer, some chunks at once."""
    frames, places, at_base = _concatenated(placed)
    n_stepped = [n for p in placed for n in p.part.n_stepped]  # of all chunks
    for first in range(0, len(n_stepped), _CHUNKS_AT_ONCE):
        some = slice(first, first + _CHUNKS_AT_ONCE)
        where = Places(places.starts[some], places.elems[some])
        if gives_bits:
            decode_bits(frames[some], base, out, places=where, base_places=at_base[some])
        else:
            decode_numbers(frames[some], n_stepped[some], out.view(np.int16), where)
    for p in () if gives_bits else placed:
        n = p.part.stop_elem - p.part.start_elem
        p.part.add_product(out[p.start : p.start + n].view(np.int16))


def _concatenated(placed: Sequence[Placed]) -> tuple[Frames, Places, I64Array]:
    """The chunks of all parts: their frames, where they go, and where the base's elements lie."""
    every, own = [p.part.frames for p in placed], [p.part.places for p in placed]
    frames = Frames(  # [tiers, chunks of all parts]
        every[0].raw,
        np.concatenate([f.starts for f in every], axis=1),
        np.concatenate([f.nbytes for f in every], axis=1),
    )
    # [chunks of all parts]
    starts = np.concatenate([o.starts + p.start for o, p in zip(own, placed, strict=True)])
    at_base = np.concatenate([o.starts + p.base_start for o, p in zip(own, placed, strict=True)])
    return frames, Places(starts, np.concatenate([o.elems for o in own])), at_base
