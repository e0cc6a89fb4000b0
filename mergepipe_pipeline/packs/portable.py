"""A pack that travels: a sealed file that names an expert and the files beside it.

It lies in `packs/ID/` beside a model, or alone: the frames of directions and of tier X, where
these lie in their files, and of each of the expert's files what is in no pack. Who takes it makes
files from them, and packs these again: what a sender says an expert holds is not believed. Of
directions alone nothing is known but the sender's word: what is made of them is named as such.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Annotated, Literal

import numpy as np

from mergepipe_pipeline.digest import seal
from mergepipe_pipeline.domain.bounds import Bound, PathBelow, Sha256, Size
from mergepipe_pipeline.domain.pack import (
    CHUNK_ELEMS,
    EXACT,
    FACTORED,
    TIERS,
    TIERS_OF,
    Level,
    PackedTensor,
    TensorContent,
    Tier,
)
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.index import NO_TAILS, frames_name
from mergepipe_pipeline.packs.offline import OfflineExpert
from mergepipe_pipeline.storage.forms import read_form

#: The folder at an address that has packs, the file in each that describes it, the one that tells
#: where frames lie, the one with vectors as they are stored, and the folder of what lies beside an
#: expert's weights.
PACKS, EXPERT, CHUNKS, VECTORS, BESIDE = "packs", "expert.json", "chunks", "vectors", "beside"
#: The tiers whose frames travel.
SENT: tuple[Tier, ...] = TIERS_OF["X"]
#: Elements of the longest vector that is sent whole.
_MOST_OF_VECTOR = 1 << 20
#: Bytes of a chunk in CHUNKS: sizes and checksums of its frames.
_CHUNK_NBYTES = len(SENT) * (4 + 8)


@dataclass(frozen=True, slots=True)
class PortableFile:
    """A file beside EXPERT, by its path there."""

    name: PathBelow
    nbytes: Size
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class PortablePack:
    """An expert that travels: `expert` names no folder, and the base by its name at the sender.

    `tensors` are in the order of their frames, and `units` are theirs.
    """

    expert: OfflineExpert
    tensors: tuple[TensorContent, ...]
    units: tuple[Annotated[float, Bound(ge=2.0**-100, le=2.0**100)], ...]
    files: tuple[PortableFile, ...]
    format: Literal["mergepipe-portable/4"] = "mergepipe-portable/4"

    @property
    def frames(self) -> Mapping[Tier, PortableFile]:
        """The files of frames, which are most of it."""
        names = {frames_name(tier): tier for tier in SENT}
        return {names[f.name]: f for f in self.files if f.name in names}

    def frames_for(self, level: Level) -> tuple[PortableFile, ...]:
        """The files of frames that a level needs."""
        return tuple(self.frames[tier] for tier in TIERS_OF[level])

    def beside_frames(self, level: Level) -> tuple[PortableFile, ...]:
        """All other files that a level needs; exact levels have vectors themselves."""
        left_out = {f.name for f in self.frames.values()} | ({VECTORS} if level in EXACT else set())
        return tuple(f for f in self.files if f.name not in left_out)

    def nbytes_of(self, level: Level) -> int:
        """Bytes of all files that a level needs."""
        return sum(f.nbytes for f in (*self.frames_for(level), *self.beside_frames(level)))

    def vectors(self, data: bytes) -> Mapping[str, bytes]:
        """What each vector stores, given the bytes of VECTORS."""
        sizes = {t.name: _nbytes_of(t) for t in self.tensors if is_vector(t)}
        stops = accumulate(sizes.values())
        return {t: data[stop - sizes[t] : stop] for t, stop in zip(sizes, stops, strict=True)}

    def to_bytes(self) -> bytes:
        """The content of EXPERT, without the folders on the sender's machine."""
        told = asdict(replace(self, expert=replace(self.expert, root="", cold="")))
        return seal({**told, "tensors": [t._asdict() for t in self.tensors]})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> PortablePack:
        """The inverse of `to_bytes`. Raises CorruptionError for bytes that it cannot have made."""
        what = "The file that describes a pack"
        next_step = "take it with the version that pushed it, or push it again"
        portable, _ = read_form(cls, data, where, what, next_step)
        if problem := next(portable._problems(), None):
            raise unfit(where, problem)
        return portable

    def packed(self, chunks: bytes, where: str) -> Mapping[str, PackedTensor]:
        """The tensors by name, given the bytes of CHUNKS.

        Raises CorruptionError for frames that do not fill their files.
        """
        rows = [TIERS.index(tier) for tier in SENT]
        start_byte, at, packed = np.zeros(len(TIERS), np.int64), 0, {}
        for content, unit in zip(self.tensors, self.units, strict=True):
            n = _chunks_of(content)
            nbytes = np.zeros((len(TIERS), n), np.uint32)  # [tiers, chunks], as `checksums`
            checksums = np.zeros((len(TIERS), n), np.uint64)
            for array, kind in ((nbytes, "<u4"), (checksums, "<u8")):
                count = len(SENT) * n
                array[rows] = np.frombuffer(chunks, kind, count, at).reshape(len(SENT), n)
                at += count * np.dtype(kind).itemsize
            no_residuals = np.full((len(TIERS), n), np.inf, np.float32)
            # A word for those that are there: each frame has a checksum of its own.
            factors = "sent" if nbytes[: len(FACTORED)].any() else ""
            packed[content.name] = PackedTensor(
                *content,
                unit,
                factors,
                0,
                nbytes,
                checksums,
                no_residuals,
                start_byte.copy(),
                NO_TAILS,
            )
            start_byte += nbytes.sum(axis=1, dtype=np.int64)
        for tier, file in self.frames.items():
            if file.nbytes != (expected := start_byte[TIERS.index(tier)]):
                raise unfit(where, f"{file.nbytes} bytes in {file.name}, of {expected}")
        return packed

    def _problems(self) -> Iterator[str]:
        """The problems of the files that it names, without a look at any of them."""
        if self.expert.root or self.expert.cold:
            yield "folders of the sender"
        files = {f.name: f for f in self.files}
        frames = {CHUNKS, VECTORS, *map(frames_name, SENT)}
        leftovers = {f"{number:06d}.leftover": f for number, f in enumerate(self.expert.files)}
        own = {name for name in files if not name.startswith(f"{BESIDE}/")}
        if len(files) < len(self.files) or own != frames | leftovers.keys():
            yield f"other files than frames and leftovers of {len(leftovers)} weight files"
        if files[CHUNKS].nbytes != _CHUNK_NBYTES * sum(map(_chunks_of, self.tensors)):
            yield f"{files[CHUNKS].nbytes} bytes in {CHUNKS}"
        if files[VECTORS].nbytes != sum(_nbytes_of(t) for t in self.tensors if is_vector(t)):
            yield f"{files[VECTORS].nbytes} bytes in {VECTORS}"
        if len(self.units) != len(self.tensors):
            yield f"{len(self.units)} units of {len(self.tensors)} tensors"
        contents = {t.name: t for t in self.tensors}
        paths = [f.path for f in self.expert.files]
        beside = [name.removeprefix(f"{BESIDE}/") for name in files.keys() - own]
        if (
            not paths
            or len(contents) < len(self.tensors)
            or len({*paths, *beside}) < len([*paths, *beside])
        ):
            yield "no file, or one of two meanings"
        for name, file in leftovers.items():
            at = 0
            for tensor, start, nbytes in file.tensors:
                content = contents.get(tensor)
                if content is None or start < at or nbytes != _nbytes_of(content):
                    yield f"the tensor {tensor!r} of {nbytes} bytes at byte {start}"
                at = start + nbytes
            left = file.nbytes - sum(n for *_, n in file.tensors)
            if at > file.nbytes or (files[name].nbytes, files[name].sha256) != (
                left,
                file.leftover_sha256,
            ):
                yield f"the file {name}, which is not what {file.path!r} has beside its tensors"


def chunks_of(tensors: Sequence[PackedTensor]) -> bytes:
    """The content of CHUNKS: of each tensor sizes and checksums, [tiers of SENT, chunks]."""
    rows = [TIERS.index(tier) for tier in SENT]
    return b"".join(
        array[rows].astype(kind).tobytes()
        for tensor in tensors
        for array, kind in ((tensor.nbytes, "<u4"), (tensor.checksums, "<u8"))
    )


def unfit(where: str, problem: str) -> CorruptionError:
    """The error that a portable pack is not of one piece."""
    return CorruptionError(
        "The file that describes a pack does not fit the pack",
        where=where,
        expected="weight files that are made of the pack's tensors and of leftovers",
        found=problem,
        next_step="do not use it before you know who made it, and how",
    )


def is_vector(content: TensorContent) -> bool:
    """Whether a tensor has no directions, but little to send."""
    return len(content.shape) < 2 and math.prod(content.shape) <= _MOST_OF_VECTOR


def _chunks_of(content: TensorContent) -> int:
    return -(-math.prod(content.shape) // CHUNK_ELEMS)


def _nbytes_of(content: TensorContent) -> int:
    return math.prod(content.shape) * itemsize(content.dtype)
