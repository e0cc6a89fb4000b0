"""Reads frames of packs through the gate: none outside the plan, and every byte is counted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.index import read_index
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.spec.blocks import Range, clip
from mergepipe_pipeline.spec.pack import CHUNK_ELEMS, PackedTensor, PackSource, Tier
from mergepipe_pipeline.storage.reader import Tally
from mergepipe_pipeline.storage.source import Reading

#: Per tensor and tier, the elements whose frames may be read; ascending.
Allowed = Mapping[tuple[str, Tier], Sequence[Range]]


class PackReader:
    """The frames of one pack; a context manager that closes its files. Safe for several threads.

    Counts into `tally`, which others may share.
    """

    def __init__(
        self, source: PackSource, allowed: Allowed, tally: Tally, reading: Reading = "ahead"
    ) -> None:
        """Raises CorruptionError for a pack that is not as it was written."""
        root = Path(source.root)
        self._tensors = Pack(source.pack_id, root, read_index(root)).tensors
        self._files = FrameFiles(root, reading)
        self.root = source.root
        self._allowed, self._tally = allowed, tally

    def __enter__(self) -> PackReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.__exit__(*error)

    def tensor(self, name: str) -> PackedTensor:
        """What the index tells of a tensor. Raises CorruptionError."""
        return self._tensors[name]

    def read(
        self, tensor: PackedTensor, tier: Tier, first_chunk: int, stop_chunk: int
    ) -> list[memoryview]:
        """The frames of chunks [first, stop), by one read; empty ones for chunks without any.

        Raises BudgetError outside the plan, CorruptionError naming file, tensor and chunk.
        """
        self._check(tensor, tier, first_chunk, stop_chunk)
        began = time.perf_counter()
        frames = self._files.read(tensor, tier, first_chunk, stop_chunk)
        self._tally.read_s += time.perf_counter() - began
        self._tally.nbytes += sum(map(len, frames))
        return frames

    def will_need(
        self, tensor: PackedTensor, tier: Tier, first_chunk: int, stop_chunk: int
    ) -> None:
        """Say that these frames will be read soon."""
        self._files.will_need(tensor, tier, first_chunk, stop_chunk)

    def _check(self, tensor: PackedTensor, tier: Tier, first_chunk: int, stop_chunk: int) -> None:
        start = first_chunk * CHUNK_ELEMS
        stop = min(stop_chunk * CHUNK_ELEMS, prod(tensor.shape))
        allowed = self._allowed.get((tensor.name, tier), ())
        if list(clip(allowed, start, stop)) != [(start, stop)]:
            raise BudgetError(
                "A read would leave the access set of the plan",
                where=f"{self.root}, {tier}, tensor {tensor.name}",
                expected=f"elements inside {list(allowed)[:4]}",
                found=f"[{start}, {stop})",
                next_step="this is a defect of mergepipe: please report it with the plan",
            )
