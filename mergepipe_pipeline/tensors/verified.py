"""Compares stored bytes, as they are read, with what they were when they were analysed.

It compares the checksums of segments. Reads in other runs (rows, short windows) bring the ends of
segments in pieces, in any order: they are kept until a segment is whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mergepipe_pipeline.digest import CHECKSUM_NBYTES, segment_checksums
from mergepipe_pipeline.domain.blocks import Range, coalesce
from mergepipe_pipeline.domain.segments import Segments
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CorruptionError

#: Compares the stored bytes of elements [start, stop). Raises CorruptionError.
Verify = Callable[[int, int, memoryview], None]
#: Fills a buffer with the stored bytes of elements [start, stop).
Fill = Callable[[int, int, memoryview], None]


class Verifier:
    """Verifies one reading of a view. Safe for several threads."""

    def __init__(self, view: TensorView, segments: Segments) -> None:
        self._numel, self._size = view.numel, itemsize(view.dtype)
        self._segments, self._elems = segments, segments.segment_elems
        self._where = f"{segments.where}, tensor {view.name}"
        self._lock = threading.Lock()
        self._open: dict[int, _Pieces] = {}

    def check(self, start_elem: int, stop_elem: int, raw: memoryview) -> None:
        """Compare the stored bytes of elements [start, stop), or keep parts of segments.

        Raises CorruptionError naming the elements that are not what was analysed.
        """
        n = self._elems
        first = -(-start_elem // n)
        last = -(-stop_elem // n) if stop_elem == self._numel else stop_elem // n
        if first < last:
            a, b = first * n, min(last * n, self._numel)
            self._compare(first, last, self._part(raw, start_elem, a, b))
            self._keep(start_elem, a, self._part(raw, start_elem, start_elem, a))
            self._keep(b, stop_elem, self._part(raw, start_elem, b, stop_elem))
        else:
            middle = min(first * n, stop_elem)  # a segment may begin inside
            self._keep(start_elem, middle, self._part(raw, start_elem, start_elem, middle))
            self._keep(middle, stop_elem, self._part(raw, start_elem, middle, stop_elem))

    def finish(self, fill: Fill | None = None) -> None:
        """Compare the segments that were read in part; `fill` reads the rest of them.

        Raises CorruptionError, also for such a segment without `fill`.
        """
        for number, pieces in sorted(self._open.items()):
            for a, b in pieces.missing():
                if fill is None:
                    raise CorruptionError(
                        "A part of a block was read, which cannot be compared with its digest",
                        where=self._where,
                        expected=f"all of elements {pieces.range}",
                        found=f"all but {[a, b]}",
                        next_step="this is a defect of mergepipe: please report it with the plan",
                    )
                fill(a, b, pieces.buffer(a, b))
            self._compare(number, number + 1, memoryview(pieces.raw))
        self._open.clear()

    def _keep(self, start: int, stop: int, raw: memoryview) -> None:
        if start >= stop:
            return
        number = start // self._elems
        with self._lock:
            if number not in self._open:
                first = number * self._elems
                last = min(first + self._elems, self._numel)
                self._open[number] = _Pieces((first, last), self._size)
            pieces = self._open[number]
            pieces.buffer(start, stop)[:] = raw
            whole = pieces.add(start, stop)
            if whole:
                del self._open[number]
        if whole:
            self._compare(number, number + 1, memoryview(pieces.raw))

    def _part(self, raw: memoryview, start: int, a: int, b: int) -> memoryview:
        return raw[(a - start) * self._size : (b - start) * self._size]

    def _compare(self, first: int, stop: int, raw: memoryview) -> None:
        actual = segment_checksums(raw, self._elems * self._size)
        expected = self._segments.checksums(first, stop)
        if actual == expected:
            return
        width = CHECKSUM_NBYTES
        number = next(
            i
            for i in range(stop - first)
            if actual[i * width : (i + 1) * width] != expected[i * width : (i + 1) * width]
        )
        a = (first + number) * self._elems
        raise CorruptionError(
            "An input's bytes are not those that were analysed",
            where=f"{self._where}, elements {a} to {min(a + self._elems, self._numel)}",
            expected=f"XXH3 {expected[number * width :][:width].hex()}",
            found=f"{actual[number * width :][:width].hex()}, in a file of the same size and time",
            next_step="copy the file again; if the change is meant, `touch` it, so that it is "
            "analysed anew",
        )


class _Pieces:
    """The bytes of one segment that came so far."""

    def __init__(self, range_: Range, size: int) -> None:
        self.range, self._size = range_, size
        self.raw = bytearray((range_[1] - range_[0]) * size)
        self._have: tuple[Range, ...] = ()

    def buffer(self, start: int, stop: int) -> memoryview:
        """Where the bytes of elements [start, stop) go."""
        first = self.range[0]
        return memoryview(self.raw)[(start - first) * self._size : (stop - first) * self._size]

    def add(self, start: int, stop: int) -> bool:
        """Say that elements [start, stop) are there; True if all are."""
        self._have = coalesce((*self._have, (start, stop)))
        return self._have == (self.range,)

    def missing(self) -> list[Range]:
        """The elements that are not there yet."""
        edges = [self.range[0], *(e for have in self._have for e in have), self.range[1]]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
