"""Reads runs of consecutive frames from a pack's files; each is compared before it is used."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from mergepipe_pipeline.digest import frame_checksum
from mergepipe_pipeline.errors import CheckpointError, CorruptionError
from mergepipe_pipeline.packs.damage import REMADE
from mergepipe_pipeline.packs.frames import Bytes, Frames, Longs, as_array
from mergepipe_pipeline.packs.index import frames_name, frames_path
from mergepipe_pipeline.packs.runs import RUN_FIELDS, Flags, lay_out, read_runs
from mergepipe_pipeline.packs.xxh3 import SHORT_NBYTES, are_equal
from mergepipe_pipeline.spec.pack import TIERS, PackedTensor, Tier
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.storage.source import LocalSource, Reading
from mergepipe_pipeline.storage.uncached import PAGE_NBYTES


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
        self, tensor: PackedTensor, wanted: Flags, first: int, stop: int, buffer: PageBuffer
    ) -> Frames:
        """Those frames of chunks [first, stop) that are `wanted` [tiers, chunks of the tensor].

        They lie in `buffer`, until it is cleared. Raises as `read`.
        """
        assert 0 <= first <= stop <= tensor.nbytes.shape[1]  # compiled code does not look
        assert wanted.shape == tensor.nbytes.shape
        starts, nbytes = np.zeros((2, len(TIERS), stop - first), np.int64)
        runs = np.empty((starts.size, RUN_FIELDS), np.int64)
        places = starts, nbytes, runs
        n, size = lay_out(tensor.frame_starts, tensor.nbytes, wanted, first, *places)
        raw = buffer.take(size)
        is_compared = self._read_runs(tensor, runs[:n], raw, starts, nbytes, first)
        frames = Frames(as_array(raw.data), starts, nbytes)
        # What is too short for the compiled comparison, or everything, to find what is wrong.
        left = (nbytes > 0) & (nbytes <= SHORT_NBYTES) if is_compared else nbytes > 0
        for tier, chunk in zip(*np.nonzero(left), strict=True):
            self._compare(tensor, frames, int(tier), int(chunk), first)
        return frames

    def _read_runs(
        self,
        tensor: PackedTensor,
        runs: Longs,
        buffer: Bytes,
        starts: Longs,
        nbytes: Longs,
        first: int,
    ) -> bool:
        """Read runs of frames into `buffer`; whether all but short frames were compared."""
        descriptors, direct = np.zeros(len(TIERS), np.int32), np.zeros(len(TIERS), np.bool_)
        done, are_alike = 0, False
        with suppress(CheckpointError), ExitStack() as lent:
            for tier in {*runs[:, 0].tolist()}:
                file = self._source.lent(frames_name(TIERS[tier]))
                descriptors[tier], direct[tier] = lent.enter_context(file)
            done, are_alike = read_runs(
                runs, descriptors, direct, buffer, starts, nbytes, tensor.checksums, first
            )
        if done == len(runs):
            return are_alike
        # An ordinary read says what is wrong, or gives what another one could not.
        for tier, chunk, start_byte, run_nbytes, at in runs[done:].tolist():
            begin = at + start_byte % PAGE_NBYTES
            into = buffer.data[begin : begin + run_nbytes]
            try:
                self._source.read_into(frames_name(TIERS[tier]), start_byte, into)
            except CheckpointError as error:
                chunks = f"chunk {chunk} and those after it"
                raise self._damaged(tensor, tier, chunks, error.expected, error.found) from error
            if direct[tier]:
                self._source.read_through_cache(frames_name(TIERS[tier]))
        return are_equal(buffer, starts, nbytes, tensor.checksums, first)

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
