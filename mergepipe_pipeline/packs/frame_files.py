"""Reads runs of consecutive frames from a pack's files; each is compared before it is used.

One compiled call reads all runs, so that no other thread waits for the interpreter: a window of a
merge reads each tier of each pack, 40,000 reads of 20 experts of 0.6B.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, I32Array, I64Array, U8Array, U32Array
from mergepipe_pipeline.domain.pack import TIERS, PackedTensor, Tier
from mergepipe_pipeline.errors import CheckpointError, DamagedPackError
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.packs.checksums import Checksums, are_equal, checksum
from mergepipe_pipeline.packs.frames import Frames, as_array
from mergepipe_pipeline.packs.index import REMADE, frames_name, frames_path
from mergepipe_pipeline.storage.compiled_reads import pages_nbytes, pread
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.storage.source import LocalSource, Reading
from mergepipe_pipeline.storage.uncached import PAGE_NBYTES

#: Fields of a run: its tier, its first chunk, where it begins in the file, its bytes, and where in
#: the buffer its first page lies.
RUN_FIELDS = 5


# It keeps the interpreter's lock: to let it go and to get it back takes longer.
@cached_njit()
def lay_out(
    frame_starts: I64Array,
    sizes: U32Array,
    wanted: BoolArray,
    first: int,
    starts: I64Array,
    nbytes: I64Array,
    runs: I64Array,
) -> tuple[int, int]:
    """Find the runs of wanted frames, each of neighbours, and give them whole pages of a buffer.

    Args:
        frame_starts: where each frame begins in its tier's file, [tiers, chunks + 1].
        sizes: their bytes, [tiers, chunks].
        wanted: whether they are read, likewise.
        first: the first chunk that is looked at; `starts` says how many.
        starts: gets where they come to lie in the buffer, [tiers, looked at].
        nbytes: gets their bytes, 0 for what is not wanted.
        runs: gets the runs, [tiers · looked at, RUN_FIELDS].

    Gives how many runs there are, and the bytes of the buffer.
    """
    n_runs, size = 0, 0
    for tier in range(len(starts)):
        chunk, stop = first, first + starts.shape[1]
        while chunk < stop:
            begin = chunk
            while chunk < stop and wanted[tier, chunk]:
                chunk += 1
            start = frame_starts[tier, begin]
            n = frame_starts[tier, chunk] - start
            if n:
                lead = start % PAGE_NBYTES
                for c in range(begin, chunk):
                    starts[tier, c - first] = size + lead + frame_starts[tier, c] - start
                    nbytes[tier, c - first] = sizes[tier, c]
                runs[n_runs] = tier, begin, start, n, size
                size += pages_nbytes(lead + n)
                n_runs += 1
            chunk += 1
    return n_runs, size


@cached_njit(nogil=True)
def read_runs(
    runs: I64Array,
    descriptors: I32Array,
    direct: BoolArray,
    buffer: U8Array,
    starts: I64Array,
    nbytes: I64Array,
    checksums: Checksums,
    first: int,
) -> tuple[int, bool]:
    """Read `runs` from each tier's file, and compare the frames as `are_equal` does.

    `direct` are the files whose pages are read past the page cache. Gives how many runs were read
    whole, one after the other, and whether all were and have what is expected.
    """
    for r in range(len(runs)):
        tier, _, start, n, at = runs[r]
        lead, place = start % PAGE_NBYTES, np.uint64(buffer.ctypes.data) + np.uint64(at)
        if direct[tier]:
            size = np.uint64(pages_nbytes(lead + n))
            n_read = pread(descriptors[tier], place, size, start - lead) - lead
        else:
            n_read = pread(descriptors[tier], place + np.uint64(lead), np.uint64(n), start)
        if n_read < n:
            return r, False
    return len(runs), are_equal(buffer, starts, nbytes, checksums, first)


class FrameTable(NamedTuple):
    """Where frames lie in some files, with their sizes and checksums, as in `PackedTensor`.

    `starts` int64 [files, chunks + 1], `nbytes` uint32 and `checksums` uint64 [files, chunks].
    """

    starts: I64Array
    nbytes: U32Array
    checksums: Checksums


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """The result of one compiled call: frames in `raw`, and the fields of runs that are `unread`.

    `are_right`: all have their checksums. `is_direct` [files]: read past the page cache.
    """

    raw: U8Array
    frames: Frames
    unread: list[list[int]]
    are_right: bool
    is_direct: BoolArray


def read_at_once(
    lent: Callable[[int], AbstractContextManager[tuple[int, bool]]],
    table: FrameTable,
    wanted: BoolArray,
    first: int,
    stop: int,
    buffer: PageBuffer,
) -> Attempt:
    """Read the frames of chunks [first, stop) that are `wanted` [files, chunks] into `buffer`.

    `lent` gives a file by its number.
    """
    starts, nbytes = np.zeros((2, len(wanted), stop - first), np.int64)
    runs = np.empty((starts.size, RUN_FIELDS), np.int64)
    n, size = lay_out(table.starts, table.nbytes, wanted, first, starts, nbytes, runs)
    runs, raw = runs[:n], buffer.take(size)
    descriptors, direct = np.zeros(len(wanted), np.int32), np.zeros(len(wanted), np.bool_)
    done, are_right = 0, False
    with suppress(CheckpointError), ExitStack() as files:
        for number in {*runs[:, 0].tolist()}:
            descriptors[number], direct[number] = files.enter_context(lent(number))
        done, are_right = read_runs(
            runs, descriptors, direct, raw, starts, nbytes, table.checksums, first
        )
    frames = Frames(as_array(raw.data), starts, nbytes)
    return Attempt(raw, frames, runs[done:].tolist(), are_right, direct)


class FrameFiles:
    """The frames of one pack; a context manager that closes its files. Safe for several threads."""

    def __init__(self, root: Path, reading: Reading = "ahead") -> None:
        self._root = root
        self._source = LocalSource(root, reading)

    def __enter__(self) -> FrameFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    def read(self, tensor: PackedTensor, tiers: Collection[Tier], first: int, stop: int) -> Frames:
        """The frames of some tiers and chunks [first, stop).

        Raises DamagedPackError naming file, tensor and chunk.
        """
        wanted = np.zeros(tensor.nbytes.shape, np.bool_)
        wanted[[TIERS.index(tier) for tier in tiers], first:stop] = True
        return self.read_wanted(tensor, wanted, first, stop, PageBuffer())

    def read_wanted(
        self, tensor: PackedTensor, wanted: BoolArray, first: int, stop: int, buffer: PageBuffer
    ) -> Frames:
        """The frames of chunks [first, stop) that are `wanted` [tiers, chunks of the tensor].

        They lie in `buffer`, until it is cleared. Raises as `read`.
        """
        assert 0 <= first <= stop <= tensor.nbytes.shape[1]  # compiled code does not look
        assert wanted.shape == tensor.nbytes.shape
        table = FrameTable(tensor.frame_starts, tensor.nbytes, tensor.checksums)
        attempt = read_at_once(self.lent, table, wanted, first, stop, buffer)
        frames, are_right = attempt.frames, attempt.are_right
        if attempt.unread:
            self._read_rest(tensor, attempt)
            are_right = are_equal(
                attempt.raw, frames.starts, frames.nbytes, tensor.checksums, first
            )
        if not are_right:
            self._refuse_wrong(tensor, frames, first)
        return frames

    def lent(self, tier: int) -> AbstractContextManager[tuple[int, bool]]:
        """Lend a tier's file as `LocalSource.lent` does."""
        return self._source.lent(frames_name(TIERS[tier]))

    def _read_rest(self, tensor: PackedTensor, attempt: Attempt) -> None:
        """Read the runs that the compiled call could not; an ordinary read says what is wrong."""
        for tier, chunk, start_byte, run_nbytes, at in attempt.unread:
            begin = at + start_byte % PAGE_NBYTES
            into = attempt.raw.data[begin : begin + run_nbytes]
            try:
                self._source.read_into(frames_name(TIERS[tier]), start_byte, into)
            except CheckpointError as error:
                chunks = f"chunk {chunk} and those after it"
                raise self._damaged(tensor, tier, chunks, error.expected, error.found) from error
            if attempt.is_direct[tier]:
                self._source.read_through_cache(frames_name(TIERS[tier]))

    def _refuse_wrong(self, tensor: PackedTensor, frames: Frames, first: int) -> None:
        """Raise DamagedPackError for the first frame, of chunks from `first` on, that is wrong."""
        for tier, chunk in zip(*np.nonzero(frames.nbytes), strict=True):
            found = checksum(as_array(frames.frame(TIERS[tier], chunk)))
            expected = int(tensor.checksums[tier, first + chunk])
            if found != expected:
                texts = f"checksum {expected:016x}", f"{found:016x}"
                raise self._damaged(tensor, tier, f"chunk {first + chunk}", *texts)

    def _damaged(
        self, tensor: PackedTensor, tier: int, chunks: str, expected: str | None, found: str | None
    ) -> DamagedPackError:
        return DamagedPackError(
            "A frame of a pack is not what was written",
            pack_id=self._root.name,
            where=f"{frames_path(self._root, TIERS[tier])}, tensor {tensor.name}, {chunks}",
            expected=expected,
            found=found,
            next_step=REMADE,
        )
