"""Reads runs of consecutive frames from a pack's files; each is compared before it is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mergepipe_pipeline.digest import frame_checksum
from mergepipe_pipeline.errors import CheckpointError, CorruptionError
from mergepipe_pipeline.packs.index import REMADE, frames_path
from mergepipe_pipeline.spec.pack import TIERS, PackedTensor, Tier
from mergepipe_pipeline.storage.source import LocalSource, Reading


class FrameFiles:
    """The frames of one pack; a context manager that closes its files. Safe for several threads."""

    def __init__(self, root: Path, reading: Reading = "ahead") -> None:
        self._root = root
        self._source = LocalSource(root, reading)

    def __enter__(self) -> FrameFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    def read(
        self, tensor: PackedTensor, tier: Tier, first_chunk: int, stop_chunk: int
    ) -> list[memoryview]:
        """The frames of chunks [first, stop) by one read; empty ones for chunks that have none.

        Raises CorruptionError naming file, tensor and chunk.
        """
        number = TIERS.index(tier)
        start, sizes = _place(tensor, number, first_chunk, stop_chunk)
        raw = memoryview(bytearray(sum(sizes)))
        path = frames_path(self._root, tier)
        if raw:
            try:
                self._source.read_into(path.name, start, raw)
            except CheckpointError as error:
                raise _damaged(path, tensor, first_chunk, error.expected, error.found) from error
        frames = []
        for chunk, size in enumerate(sizes, first_chunk):
            frame, raw = raw[:size], raw[size:]
            expected, found = int(tensor.checksums[number, chunk]), frame_checksum(frame)
            if size and found != expected:
                raise _damaged(path, tensor, chunk, f"XXH3 {expected:016x}", f"{found:016x}")
            frames.append(frame)
        return frames

    def will_need(
        self, tensor: PackedTensor, tier: Tier, first_chunk: int, stop_chunk: int
    ) -> None:
        """Say that the frames of chunks [first, stop) will be read soon."""
        start, sizes = _place(tensor, TIERS.index(tier), first_chunk, stop_chunk)
        self._source.will_need(frames_path(self._root, tier).name, start, sum(sizes))


def _place(
    tensor: PackedTensor, tier: int, first_chunk: int, stop_chunk: int
) -> tuple[int, list[int]]:
    """Where the frames of chunks [first, stop) begin in a tier's file, and their sizes."""
    nbytes = tensor.nbytes[tier]
    start = int(tensor.start_byte[tier] + nbytes[:first_chunk].sum(dtype=np.int64))
    return start, nbytes[first_chunk:stop_chunk].tolist()


def _damaged(
    path: Path, tensor: PackedTensor, chunk: int, expected: str | None, found: str | None
) -> CorruptionError:
    return CorruptionError(
        "A frame of a pack is not what was written",
        where=f"{path}, tensor {tensor.name}, chunk {chunk}",
        expected=expected,
        found=found,
        next_step=REMADE,
    )
