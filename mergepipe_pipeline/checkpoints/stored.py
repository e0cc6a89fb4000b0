"""Reads the stored elements of views, and compares them with the digests of their analysis.

Functions of this package import torch when they compute: it takes a second to load, and a merge of
stored bfloat16 can do without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mergepipe_pipeline.arrays import U8Array
from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.digest import CHECKSUM_NBYTES, segment_checksums
from mergepipe_pipeline.domain.blocks import Range, coalesce
from mergepipe_pipeline.domain.segments import KnownSegments, Segments
from mergepipe_pipeline.domain.view import Part, TensorView, view_of_part
from mergepipe_pipeline.dtypes import TORCH_NAME, itemsize
from mergepipe_pipeline.errors import CorruptionError

if TYPE_CHECKING:
    import torch

    from mergepipe_pipeline.storage.read_batch import ReadBatch

#: The reader of a source by its number in the views.
Readers = Callable[[int], BlockReader]
#: Compares the stored bytes of elements [start, stop). Raises CorruptionError.
Verify = Callable[[int, int, memoryview], None]
#: Fills a buffer with the stored bytes of elements [start, stop).
Fill = Callable[[int, int, memoryview], None]


def read_stored(
    readers: Readers,
    view: TensorView,
    start_elem: int,
    stop_elem: int,
    out: memoryview,
    verify: Verify | None = None,
    batch: ReadBatch | None = None,
) -> None:
    """Fill `out` with the stored bytes of elements [start, stop) of a view; verify them.

    With a `batch`, this happens when it runs. Raises BudgetError outside an access set,
    CheckpointChangedError if a file is shorter, CorruptionError for bytes that `verify` refuses.
    """
    size = itemsize(view.dtype)
    for part, at, start, stop in _pieces(view, start_elem, stop_elem):
        piece = out[(start - start_elem) * size : (stop - start_elem) * size]
        if part.codes is not None:
            from mergepipe_pipeline.checkpoints.codes import read_values

            read_values(readers(part.source), part.entry, part.codes, at, piece, batch)
        elif batch is None:
            readers(part.source).read_into(part.entry, at, at + stop - start, piece)
        else:
            readers(part.source).put(batch, part.entry, at, at + stop - start, piece)
    if verify and batch is not None:
        batch.then(partial(verify, start_elem, stop_elem, out))
    elif verify:
        verify(start_elem, stop_elem, out)


def announce_stored(readers: Readers, view: TensorView, start_elem: int, stop_elem: int) -> None:
    """Say that `read_stored` will be asked for elements [start, stop) of a view soon."""
    for part, at, start, stop in _pieces(view, start_elem, stop_elem):
        if part.codes is None or not part.codes.is_turned:  # of these whole matrices are read
            for entry, a, b in part.stored_ranges([(at, at + stop - start)]):
                readers(part.source).will_need(entry, a, b)


def _pieces(
    view: TensorView, start_elem: int, stop_elem: int
) -> Iterator[tuple[Part, int, int, int]]:
    """Where elements [start, stop) are stored: a part, the first element there, and which."""
    if not view.runs:
        yield view.stored[0], start_elem, start_elem, stop_elem
    for run in view.runs:
        a, b = max(start_elem, run.start_elem), min(stop_elem, run.start_elem + run.n_elems)
        if a < b:
            yield view.stored[run.part], run.at_elem + a - run.start_elem, a, b


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype of a safetensors code."""
    import torch

    dtype = getattr(torch, TORCH_NAME[code])
    assert isinstance(dtype, torch.dtype)
    return dtype


def typed(raw: U8Array, dtype: str) -> torch.Tensor:
    """[n] elements of `dtype` over the same memory as their little-endian bytes."""
    import torch

    return torch.from_numpy(raw).view(torch_dtype(dtype))


def as_float32(raw: U8Array, dtype: str) -> torch.Tensor:
    """[n] float32 from the little-endian bytes of n elements of `dtype`."""
    import torch

    return typed(raw, dtype).to(torch.float32)


class Verifier:
    """Verifies one reading of a view. Safe for several threads."""

    def __init__(self, view: TensorView, segments: Segments) -> None:
        self._numel, self._size = view.numel, itemsize(view.dtype)
        self._segments, self._elems = segments, segments.segment_elems
        self._where = f"{segments.where}, tensor {view.name}"
        self._lock = threading.Lock()
        self._open: dict[int, _Segment] = {}

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
                self._open[number] = _Segment((first, last), self._size)
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


class Verifiers:
    """Verifies what a pass reads of some views; each is finished when it was read."""

    def __init__(self, readers: Readers, known: KnownSegments) -> None:
        self._readers, self._known = readers, known
        self._views: list[tuple[TensorView, Verifier]] = []

    def of_view(self, view: TensorView) -> Verify:
        """Compares the elements of a view, in its order."""
        self._views.append((view, Verifier(view, self._known.of_view(view))))
        return self._views[-1][1].check

    def of_stored(self, part: Part) -> None:
        """Compare all that is read of the stored tensors from which a part's values follow."""
        for stored in (Part(part.source, entry) for entry in part.entries):
            view = view_of_part(stored, stored.entry.name)
            self._views.append((view, Verifier(view, self._known.of_part(stored))))
            self._readers(stored.source).verify_with(stored.entry, self._views[-1][1].check)

    def finish(self) -> None:
        """Verify the segments that were read in part; raises as `Verifier.finish`."""
        for view, verifier in self._views:
            for part in view.stored:
                self._readers(part.source).verified(part.entry, verifier.check)
            verifier.finish(partial(read_stored, self._readers, view))


class _Segment:
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


#: Per dtype its bits as an unsigned integer, and the least that is not finite without the sign:
#: an exponent of ones; float8_e4m3fn has no infinity, and one NaN.
_LEAST = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
}


def count_non_finite(raw: U8Array, dtype: str) -> int:
    """How many elements of `dtype` in the bytes `raw` are NaN or infinite; of integers none."""
    if dtype not in _LEAST or not len(raw):
        return 0
    kind, least = _LEAST[dtype]
    bits = raw.view(kind)
    signed = bits.view(kind.replace("u", "i"))
    sign = 1 << (8 * bits.itemsize - 1)
    # Read as numbers, bits of either sign are in order; the two largest tell almost always.
    if int(signed.max()) < least and int(bits.max()) < sign | least:
        return 0
    return int(np.count_nonzero((bits & bits.dtype.type(sign - 1)) >= least))
