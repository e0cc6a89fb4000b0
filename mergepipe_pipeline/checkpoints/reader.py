"""Reads runs of elements of a checkpoint, through the gate: nothing outside the access set.

Budgeted bytes of checkpoints are counted here (those of packs in `packs.elements`): the bytes of
each request, without the rest of the disk's pages.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from mergepipe_pipeline.arrays import U8Array
from mergepipe_pipeline.domain.blocks import Range, clip
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import BudgetError, CheckpointChangedError
from mergepipe_pipeline.storage.source import (
    FileRange,
    RangedFiles,
    Reading,
    Use,
    open_source,
)

if TYPE_CHECKING:
    from mergepipe_pipeline.checkpoints.stored import Verify
    from mergepipe_pipeline.storage.read_batch import ReadBatch


#: What a reader keeps of scales that many windows need; more where one piece is large.
_KEPT_NBYTES = 16 << 20


class Tally(threading.local):
    """The bytes that the calling thread has read so far, and the seconds it took."""

    nbytes = 0
    read_s = 0.0


class BlockReader:
    """Ranged reads of one checkpoint; `allowed`: element ranges by tensor (None: all).

    Counts into `tally`, which others may share.
    """

    def __init__(
        self,
        source: RangedFiles,
        checkpoint: Checkpoint,
        allowed: Mapping[str, Sequence[Range]] | None,
        tally: Tally | None = None,
    ) -> None:
        self._source = source
        self._checkpoint = checkpoint
        self._allowed = allowed
        self._tally = tally or Tally()
        self._keeping = threading.Lock()
        self._kept: OrderedDict[tuple[str, int, int], U8Array] = OrderedDict()
        self._verify: dict[str, Verify] = {}

    def read_into(
        self, entry: TensorEntry, start_elem: int, stop_elem: int, out: memoryview
    ) -> None:
        """Fill `out` (bytes) with elements [start, stop) of a tensor by one ranged read.

        Raises BudgetError outside the access set, CheckpointChangedError if the file is shorter.
        """
        start_byte = self._start_byte(entry, start_elem, stop_elem, len(out))
        began = time.perf_counter()
        self._source.read_into(entry.file, start_byte, out)
        self._tally.read_s += time.perf_counter() - began
        self._tally.nbytes += len(out)
        if verify := self._verify.get(entry.name):
            verify(start_elem, stop_elem, out)

    def put(
        self,
        batch: ReadBatch,
        entry: TensorEntry,
        start_elem: int,
        stop_elem: int,
        out: memoryview,
    ) -> None:
        """Read as `read_into` when the batch runs, whose time is not counted here."""
        start_byte = self._start_byte(entry, start_elem, stop_elem, len(out))
        self._source.put(batch, entry.file, start_byte, out)
        self._tally.nbytes += len(out)
        if verify := self._verify.get(entry.name):
            batch.then(partial(verify, start_elem, stop_elem, out))

    def verify_with(self, entry: TensorEntry, verify: Verify) -> None:
        """Give `verify` all that is read of a tensor from now on, instead of another."""
        self._verify[entry.name] = verify

    def verified(self, entry: TensorEntry, verify: Verify) -> None:
        """Give `verify` no more, if it is given what is read of a tensor."""
        if self._verify.get(entry.name) == verify:
            del self._verify[entry.name]

    def lend(
        self, batch: ReadBatch, entry: TensorEntry, start_elem: int, stop_elem: int, use: Use
    ) -> bool:
        """Let `use` have bytes where they are held, when the batch runs; False if none will be."""
        nbytes = (stop_elem - start_elem) * itemsize(entry.dtype)
        start_byte = self._start_byte(entry, start_elem, stop_elem, nbytes)
        is_lent = self._source.lend(batch, entry.file, start_byte, nbytes, use)
        self._tally.nbytes += nbytes if is_lent else 0
        return is_lent

    def expect(self, tensors: Iterable[TensorEntry]) -> None:
        """Say that these tensors, whole, are all that will be read."""
        ends = ((t.file, t.start_byte, t.start_byte + t.nbytes) for t in tensors)
        self._source.expect(FileRange(*end) for end in ends)

    def will_need(self, entry: TensorEntry, start_elem: int, stop_elem: int) -> None:
        """Say that elements [start, stop) will be read soon."""
        size = itemsize(entry.dtype)
        start, nbytes = entry.start_byte + start_elem * size, (stop_elem - start_elem) * size
        self._source.will_need(entry.file, start, nbytes)

    def read(self, entry: TensorEntry, start_elem: int, stop_elem: int) -> bytearray:
        """Elements [start, stop) of a tensor as bytes; raises as `read_into`."""
        buffer = bytearray((stop_elem - start_elem) * itemsize(entry.dtype))
        self.read_into(entry, start_elem, stop_elem, memoryview(buffer))
        return buffer

    def kept(self, entry: TensorEntry, start_elem: int, stop_elem: int) -> U8Array:
        """The bytes of elements [start, stop), read once for all who ask for the same.

        Of elements outside the access set the bytes are zeros. The last ones are kept. Raises as
        `read_into`.
        """
        key = entry.name, start_elem, stop_elem
        with self._keeping:
            if key not in self._kept:
                size = itemsize(entry.dtype)
                raw = np.zeros((stop_elem - start_elem) * size, np.uint8)
                allowed = [(start_elem, stop_elem)]
                if self._allowed is not None:
                    allowed = list(clip(self._allowed.get(entry.name, ()), start_elem, stop_elem))
                for a, b in allowed:
                    out = raw[(a - start_elem) * size : (b - start_elem) * size]
                    self.read_into(entry, a, b, out.data)
                self._kept[key] = raw
                while sum(map(len, self._kept.values())) > max(_KEPT_NBYTES, 4 * len(raw)):
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def verify_unchanged(self) -> None:
        """Raise CheckpointChangedError if any weight file is not the one that was opened."""
        for f in self._checkpoint.files:
            stamp = (self._source.size(f.path), self._source.mtime_ns(f.path))
            if stamp != (f.nbytes, f.mtime_ns):
                raise CheckpointChangedError(
                    "A checkpoint changed while it was read",
                    where=f"{self._checkpoint.root}, {f.path}",
                    expected=f"{f.nbytes} bytes, mtime {f.mtime_ns}",
                    found=f"{stamp[0]} bytes, mtime {stamp[1]}",
                    next_step="run the same command again: it starts from the files as they are",
                )

    def _start_byte(self, entry: TensorEntry, start_elem: int, stop_elem: int, nbytes: int) -> int:
        """Where elements [start, stop) begin in their file. Raises BudgetError as `read_into`."""
        if self._allowed is not None:
            self._check(entry, start_elem, stop_elem)
        size = itemsize(entry.dtype)
        if (
            nbytes != (stop_elem - start_elem) * size
            or not 0 <= start_elem <= stop_elem <= entry.numel
        ):
            raise ValueError(f"buffer of {nbytes} bytes for [{start_elem}, {stop_elem}) of {entry}")
        return entry.start_byte + start_elem * size

    def _check(self, entry: TensorEntry, start_elem: int, stop_elem: int) -> None:
        ranges = (self._allowed or {}).get(entry.name, ())
        at = bisect_right(ranges, start_elem, key=itemgetter(0)) - 1  # they are sorted, and apart
        if at < 0 or stop_elem > ranges[at][1]:
            raise BudgetError(
                "A read would leave the access set of the plan",
                where=f"{self._checkpoint.name}, tensor {entry.name}",
                expected=f"elements inside {list(ranges)[:4]}",
                found=f"[{start_elem}, {stop_elem})",
                next_step="this is a defect of mergepipe: please report it with the plan",
            )


@contextmanager
def open_reader(checkpoint: Checkpoint, reading: Reading = "ahead") -> Iterator[BlockReader]:
    """All of a checkpoint for reading; raises as `open_source`."""
    with open_source(checkpoint.root, reading) as source:
        yield BlockReader(source, checkpoint, None)
