"""A pack that travels: a sealed file that names its expert and the files beside it.

It lies in `packs/ID/` beside a model, or alone, with the pack's own files and the bytes of each
file of the expert that are in no pack. The catalog's facts of the expert do not travel: the
receiver computes them again, and need not trust the sender.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import PurePosixPath
from typing import Literal

from mergepipe_pipeline.digest import seal
from mergepipe_pipeline.domain.pack import PACKED_DTYPES, TIERS
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.record_form import RecordForm
from mergepipe_pipeline.packs.replaced import Replaced, record_of
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.storage.forms import Form, PathBelow, Sha256, Size, read_form

#: The folder at an address that has packs, and the file in each that describes it.
PACKS = "packs"
EXPERT = "expert.json"
_FORMAT = "mergepipe-travelling/1"
#: The files of a pack, and what its expert has beside its tensors.
_OWN = re.compile(
    rf"({'|'.join(TIERS)})\.frames|(index|chunks|sums|checksums)\.[0-9a-f]{{32}}\.parquet|\d{{6}}\.rest"
)
#: Above the tables of a hundred thousand tensors.
_MOST_TABLE_NBYTES = 1 << 30


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


class _FileForm(Form):
    name: PathBelow
    nbytes: Size
    sha256: Sha256


class _TravellingForm(Form):
    format: Literal["mergepipe-travelling/1"]
    record: RecordForm
    files: tuple[_FileForm, ...]


def from_bytes(data: bytes, where: str) -> Travelling:
    """The inverse of `to_bytes`. Raises CorruptionError for bytes that it cannot have made."""
    what = "The file that describes a pack"
    next_step = "take it with the version that pushed it, or push it again"
    form, _ = read_form(_TravellingForm, data, where, what, next_step)
    files = tuple(TravellingFile(f.name, f.nbytes, f.sha256) for f in form.files)
    travelling = Travelling(record_of(form.record.model_dump()), files)
    if problem := next(_odd_files(travelling), None):
        raise _odd(where, problem)
    return travelling


def _odd_files(of: Travelling) -> Iterator[str]:
    """What is wrong with the files of a pack that travels, without a look at any of them."""
    own = {f.name: f for f in of.own}
    if len(own) < len(of.own):
        yield "a file twice"
    yield from (f"the file {name!r}" for name in own if not _OWN.fullmatch(name))
    rests = {f"{number:06d}.rest": file for number, file in enumerate(of.record.files)}
    if rests.keys() != {name for name in own if name.endswith(".rest")}:
        yield f"other rests than those of {len(rests)} files"
    for name, file in rests.items():
        nbytes = file.nbytes - sum(n for *_, n in file.tensors)
        if (own[name].nbytes, own[name].sha256) != (nbytes, file.rest_sha256):
            yield f"the file {name}, which is not what {file.path!r} has beside its tensors"
        if not file.tensors and file.sha256 != file.rest_sha256:
            yield f"sha256 {file.sha256[:16]} of {file.path!r}, which is all in {name}"
    for file in of.record.files:
        if file.mode is not None and file.mode & ~0o777:
            yield f"the permissions {file.mode:o} of {file.path!r}"
    for name, f in own.items():
        if name.endswith(".parquet") and f.nbytes > _MOST_TABLE_NBYTES:
            yield f"{f.nbytes} bytes in {name}"


def _odd(where: str, problem: str) -> CorruptionError:
    return CorruptionError(
        "The file that describes a pack does not fit the pack",
        where=where,
        expected="files that are made of the pack's tensors and of rests",
        found=problem,
        next_step="do not use it before you know who made it, and how",
    )


def refuse_odd(record: Replaced, pack: Pack) -> None:
    """Raise CorruptionError for a record whose files could not be made from its pack and rests."""
    if problem := next(_problems(record, pack), None):
        raise _odd(record.name, problem)


def _problems(record: Replaced, pack: Pack) -> Iterator[str]:
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
