"""Reads frames of packs through the gate: none outside the plan, and every byte is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from mergepipe_pipeline.arrays import BoolArray
from mergepipe_pipeline.checkpoints.reader import Tally
from mergepipe_pipeline.domain.blocks import Range
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, TIERS, PackedTensor, PackSource, Tier
from mergepipe_pipeline.errors import BudgetError, CorruptionError, DamagedPackError
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.frames import Frames
from mergepipe_pipeline.packs.index import read_index
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.storage.source import Reading

#: Per tensor and tier, the elements whose frames may be read; ascending.
Allowed = Mapping[tuple[str, Tier], Sequence[Range]]


class WantedFrames(NamedTuple):
    """The frames of a tensor that a plan takes of a pack: `wanted` [tiers, chunks] of `files`."""

    files: FrameFiles
    tensor: PackedTensor
    wanted: BoolArray
    tally: Tally


class PackReader:
    """The frames of one pack; a context manager that closes its files. Safe for several threads.

    Counts into `tally`, which others may share.
    """

    def __init__(
        self, source: PackSource, allowed: Allowed, tally: Tally, reading: Reading = "ahead"
    ) -> None:
        """Raises DamagedPackError for a pack that is not as it was written."""
        self._pack_id, root = source.pack_id, Path(source.root)
        with self._damage_named():
            self._tensors = Pack(source.pack_id, root, read_index(root)).tensors
        self._files = FrameFiles(root, reading)
        self.root = source.root
        self._allowed, self._tally = allowed, tally
        self._gates: dict[str, BoolArray] = {}

    def __enter__(self) -> PackReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.__exit__(*error)

    def tensor(self, name: str) -> PackedTensor:
        """The index's record of a tensor. Raises DamagedPackError."""
        with self._damage_named():
            return self._tensors[name]

    def read(
        self, tensor: PackedTensor, wanted: BoolArray, first: int, stop: int, buffer: PageBuffer
    ) -> Frames:
        """As `FrameFiles.read_wanted`. Raises BudgetError outside the plan, DamagedPackError."""
        self._admit(tensor, wanted, first, stop)
        began = time.perf_counter()
        with self._damage_named():
            frames = self._files.read_wanted(tensor, wanted, first, stop, buffer)
        self._tally.read_s += time.perf_counter() - began
        self._tally.nbytes += int(frames.nbytes.sum())
        return frames

    def wanted(self, tensor: PackedTensor, wanted: BoolArray) -> WantedFrames:
        """Frames to be read together with those of other packs. Raises BudgetError as `read`."""
        self._admit(tensor, wanted, 0, wanted.shape[1])
        return WantedFrames(self._files, tensor, wanted, self._tally)

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except DamagedPackError:  # of another version
            raise
        except CorruptionError as error:
            raise DamagedPackError(
                error.what,
                pack_id=self._pack_id,
                where=error.where,
                expected=error.expected,
                found=error.found,
                next_step=error.next_step,
            ) from error

    def _gate(self, tensor: PackedTensor) -> BoolArray:
        """The frames that may be read, [tiers, chunks]."""
        if tensor.name not in self._gates:
            gate = np.zeros(tensor.nbytes.shape, np.bool_)
            for number, tier in enumerate(TIERS):
                for a, b in self._allowed.get((tensor.name, tier), ()):
                    gate[number, a // CHUNK_ELEMS : -(-b // CHUNK_ELEMS)] = True
            self._gates[tensor.name] = gate
        return self._gates[tensor.name]

    def _admit(self, tensor: PackedTensor, wanted: BoolArray, first: int, stop: int) -> None:
        """Raise BudgetError for `wanted` frames of chunks [first, stop) that may not be read."""
        outside = wanted[:, first:stop] & ~self._gate(tensor)[:, first:stop]
        if outside.any():
            self._refuse(tensor, outside, first)

    def _refuse(self, tensor: PackedTensor, outside: BoolArray, first: int) -> NoReturn:
        number, chunk = (int(x[0]) for x in np.nonzero(outside))
        allowed = self._allowed.get((tensor.name, TIERS[number]), ())
        raise BudgetError(
            "A read would leave the access set of the plan",
            where=f"{self.root}, {TIERS[number]}, tensor {tensor.name}",
            expected=f"elements inside {list(allowed)[:4]}",
            found=f"chunk {first + chunk}, of {CHUNK_ELEMS} elements",
            next_step="this is a defect of mergepipe: please report it with the plan",
        )
