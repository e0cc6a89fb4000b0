"""Reads runs of consecutive frames from a pack's files; each is compared before it is used."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from mergepipe_pipeline.digest import frame_checksum
from mergepipe_pipeline.errors import CheckpointError, CorruptionError
from mergepipe_pipeline.packs.index import REMADE, frames_name, frames_path
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
        starts = tensor.frame_starts[number, first_chunk : stop_chunk + 1].tolist()
        raw = np.empty(starts[-1] - starts[0], np.uint8).data
        if not raw:
            return [raw] * (stop_chunk - first_chunk)
        try:
            self._source.read_into(frames_name(tier), starts[0], raw)
        except CheckpointError as error:
            path = frames_path(self._root, tier)
            raise _damaged(path, tensor, first_chunk, error.expected, error.found) from error
        frames = [raw[a - starts[0] : b - starts[0]] for a, b in pairwise(starts)]
        checksums = tensor.checksums[number, first_chunk:stop_chunk].tolist()
        for chunk, (frame, expected) in enumerate(zip(frames, checksums, strict=True), first_chunk):
            if frame and (found := frame_checksum(frame)) != expected:
                path = frames_path(self._root, tier)
                raise _damaged(path, tensor, chunk, f"XXH3 {expected:016x}", f"{found:016x}")
        return frames

    def will_need(
        self, tensor: PackedTensor, tier: Tier, first_chunk: int, stop_chunk: int
    ) -> None:
        """Say that the frames of chunks [first, stop) will be read soon."""
        starts = tensor.frame_starts[TIERS.index(tier)]
        start, stop = int(starts[first_chunk]), int(starts[stop_chunk])
        if start < stop:
            self._source.will_need(frames_name(tier), start, stop - start)


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
