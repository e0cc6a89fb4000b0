"""Reads runs of consecutive frames from a pack's files; each is compared before it is used."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, I64Array, U8Array, U32Array
from mergepipe_pipeline.digest import frame_checksum
from mergepipe_pipeline.domain.pack import TIERS, PackedTensor, Tier
from mergepipe_pipeline.errors import CheckpointError, CorruptionError
from mergepipe_pipeline.packs.damage import REMADE
from mergepipe_pipeline.packs.frames import Frames, as_array
from mergepipe_pipeline.packs.index import frames_name, frames_path
from mergepipe_pipeline.packs.runs import RUN_FIELDS, lay_out, read_runs
from mergepipe_pipeline.packs.xxh3 import SHORT_NBYTES, Hashes, are_equal
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.storage.source import LocalSource, Reading
from mergepipe_pipeline.storage.uncached import PAGE_NBYTES


class FrameTable(NamedTuple):
    """Where frames lie in some files, with their sizes and checksums, as in `PackedTensor`.

    `starts` int64 [files, chunks + 1], `nbytes` uint32 and `checksums` uint64 [files, chunks].
    """

    starts: I64Array
    nbytes: U32Array
    checksums: Hashes


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """What one compiled call read: frames in `raw`, and the runs that are `left`, in their fields.

    `is_compared`: all have their checksums, but for short ones. `is_direct` [files]: read past the
    page cache.
    """

    raw: U8Array
    frames: Frames
    unread: list[list[int]]
    is_compared: bool
    is_direct: BoolArray

    @property
    def is_short(self) -> BoolArray:
        """Which frames were too short to be compared, [files, chunks]."""
        return (self.frames.nbytes > 0) & (self.frames.nbytes <= SHORT_NBYTES)


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
    done, are_alike = 0, False
    with suppress(CheckpointError), ExitStack() as files:
        for number in {*runs[:, 0].tolist()}:
            descriptors[number], direct[number] = files.enter_context(lent(number))
        done, are_alike = read_runs(
            runs, descriptors, direct, raw, starts, nbytes, table.checksums, first
        )
    frames = Frames(as_array(raw.data), starts, nbytes)
    return Attempt(raw, frames, runs[done:].tolist(), are_alike, direct)


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

        Raises CorruptionError naming file, tensor and chunk.
        """
        wanted = np.zeros(tensor.nbytes.shape, np.bool_)
        wanted[[TIERS.index(tier) for tier in tiers], first:stop] = True
        return self.read_wanted(tensor, wanted, first, stop, PageBuffer())

    def read_wanted(
        self, tensor: PackedTensor, wanted: BoolArray, first: int, stop: int, buffer: PageBuffer
    ) -> Frames:
        """Those frames of chunks [first, stop) that are `wanted` [tiers, chunks of the tensor].

        They lie in `buffer`, until it is cleared. Raises as `read`.
        """
        assert 0 <= first <= stop <= tensor.nbytes.shape[1]  # compiled code does not look
        assert wanted.shape == tensor.nbytes.shape
        table = FrameTable(tensor.frame_starts, tensor.nbytes, tensor.checksums)
        attempt = read_at_once(self.lent, table, wanted, first, stop, buffer)
        frames, is_compared = attempt.frames, attempt.is_compared
        if attempt.unread:
            self._read_rest(tensor, attempt)
            is_compared = are_equal(
                attempt.raw, frames.starts, frames.nbytes, tensor.checksums, first
            )
        # Frames too short for the compiled comparison; or all of them, to find the wrong one.
        to_compare = attempt.is_short if is_compared else frames.nbytes > 0
        for tier, chunk in zip(*np.nonzero(to_compare), strict=True):
            self._compare(tensor, frames, int(tier), int(chunk), first)
        return frames

    def lent(self, tier: int) -> AbstractContextManager[tuple[int, bool]]:
        """As `LocalSource.lent`, of a tier's file."""
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

    def _compare(
        self, tensor: PackedTensor, frames: Frames, tier: int, chunk: int, first: int
    ) -> None:
        """Compare one frame, that of `chunk` after the first, with its checksum."""
        frame = frames.frame(TIERS[tier], chunk)
        expected, found = int(tensor.checksums[tier, first + chunk]), frame_checksum(frame)
        if found != expected:
            texts = f"XXH3 {expected:016x}", f"{found:016x}"
            raise self._damaged(tensor, tier, f"chunk {first + chunk}", *texts)

    def _damaged(
        self, tensor: PackedTensor, tier: int, chunks: str, expected: str | None, found: str | None
    ) -> CorruptionError:
        return CorruptionError(
            "A frame of a pack is not what was written",
            where=f"{frames_path(self._root, TIERS[tier])}, tensor {tensor.name}, {chunks}",
            expected=expected,
            found=found,
            next_step=REMADE,
        )
