"""A pack that travels: a sealed file that names its expert and the files beside it.

It lies in `packs/ID/` beside a model, or alone, with the pack's own files and the bytes of each
file of the expert that are in no pack. The catalog's facts of the expert do not travel: the
receiver computes them again, and need not trust the sender.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import PurePosixPath

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.replaced import Replaced, record_of
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.spec.pack import PACKED_DTYPES
from mergepipe_pipeline.storage.chain import NAME, NAME_FORM

#: The folder at an address that has packs, and the file in each that describes it.
PACKS = "packs"
EXPERT = "expert.json"
_FORMAT = "mergepipe-travelling/1"


@dataclass(frozen=True, slots=True)
class TravellingFile:
    """A file beside EXPERT, by its path there."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Travelling:
    """An expert that travels. `record` names no folder; its base is a name where it was packed."""

    record: Replaced
    files: tuple[TravellingFile, ...]

    @property
    def own(self) -> tuple[TravellingFile, ...]:
        """The files of the pack and the rests; earlier releases sent others in folders."""
        return tuple(f for f in self.files if "/" not in f.name)

    @property
    def nbytes(self) -> int:
        """Bytes of these."""
        return sum(f.nbytes for f in self.own)


def to_bytes(record: Replaced, files: Sequence[TravellingFile]) -> bytes:
    """The content of EXPERT, without the folders on the sender's machine."""
    record_json = asdict(replace(record, root="", cold=""))
    return seal({"format": _FORMAT, "record": record_json, "files": [asdict(f) for f in files]})


def from_bytes(data: bytes, where: str) -> Travelling:
    """The inverse of `to_bytes`. Raises CorruptionError for bytes that it cannot have made."""
    value = unseal(data, where)
    try:
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']}")
        travelling = Travelling(
            record_of(value["record"]), tuple(TravellingFile(**f) for f in value["files"])
        )
        if wrong := [path for path in _paths(travelling) if not _is_plain(path)]:
            raise ValueError(f"the path {wrong[0]!r}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(
            "The file that describes a pack has another form than this version writes",
            where=where,
            expected=_FORMAT,
            found=str(error)[:200],
            next_step="take it with the version that pushed it, or push it again",
        ) from error
    return travelling


def _paths(of: Travelling) -> Iterator[str]:
    """All names that files and folders get here, on receipt and when unpacked."""
    record = of.record
    yield from (f.name for f in of.files)
    yield from (f.path for f in record.files)
    yield from (f.path for f in record.folders if f.path != ".")
    yield from (record.checkpoint_id, record.pack_id, record.name)


def _is_plain(name: str) -> bool:
    """Whether a path stays below the folder that it is relative to."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name


def refuse_odd(record: Replaced, pack: Pack) -> None:
    """Raise CorruptionError for a record whose files could not be made from its pack and rests."""
    if problem := next(_problems(record, pack), None):
        raise CorruptionError(
            "The file that describes a pack does not fit the pack",
            where=record.name,
            expected="files that are made of the pack's tensors and of rests",
            found=problem,
            next_step="do not use it before you know who made it, and how",
        )


def _problems(record: Replaced, pack: Pack) -> Iterator[str]:
    if not NAME.fullmatch(record.name):
        yield f"the name {record.name!r}, which is to be {NAME_FORM}"
    if not record.files:
        yield "no file"
    for packed in pack.contents.values():
        if packed.dtype not in PACKED_DTYPES:
            yield f"a tensor of {packed.dtype}, of which there are no levels"
    folders = {PurePosixPath(f.path) for f in record.folders}
    paths = [PurePosixPath(f.path) for f in record.files]
    times = Counter(paths)
    inside = {parent for path in times for parent in path.parents} | folders
    for file, path in zip(record.files, paths, strict=True):
        if path in inside or times[path] > 1:
            yield f"the file {file.path!r}, where another one or a folder is"
        at = 0
        for name, start, nbytes in file.tensors:
            content = pack.contents.get(name)
            if content is None:
                yield f"the tensor {name!r}, which the pack does not have"
            elif start < at or nbytes != prod(content.shape) * itemsize(content.dtype):
                yield f"the tensor {name!r} of {nbytes} bytes at byte {start}"
            at = start + nbytes
        if at > file.nbytes:
            yield f"tensors to byte {at} of {file.path!r}, which has {file.nbytes}"
