"""The digests of a checkpoint's tensors and of their segments, in sealed files by its id.

A row group has those of some tensors. A merge asks for one tensor after the other in the
checkpoint's order: it holds one row group of each input. A pass that was killed leaves parts, from
which it goes on; the file of the whole is written when every tensor is known. `domain.segments`
says what a segment is.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa

from mergepipe_pipeline.catalog.arrow_tables import Key, encode_groups
from mergepipe_pipeline.catalog.formats import CONTENTS
from mergepipe_pipeline.catalog.row_groups import RowGroups, read_parts
from mergepipe_pipeline.catalog.seals import (
    damaged,
    find_sealed,
    name_parts,
    version,
    write_sealed,
)
from mergepipe_pipeline.digest import SEGMENT_DIGEST_NBYTES, digest_json
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.segments import COARSE_ELEMS, Segments
from mergepipe_pipeline.errors import CorruptionError

#: A row is a tensor; `fine` is null where no grid has asked for such short segments.
SEGMENTS = pa.schema(
    [
        ("tensor", pa.string()),
        ("digest", pa.string()),
        ("coarse", pa.binary()),
        ("fine", pa.binary()),
    ]
)
#: Of digests in a row group: those of 1 GiB of bfloat16.
_GROUP_NBYTES = 1 << 18
_PART = ".part"

Row = tuple[str, str, bytes | None, bytes | None]


def whole_ids(folder: Path) -> frozenset[str]:
    """The ids of checkpoints whose digests are there, damaged or not; reads none."""
    stems = (name_parts(path)[0] for path in find_sealed(folder / CONTENTS))
    return frozenset(stem for stem in stems if not stem.endswith(_PART))


class ContentFiles:
    """The digests of a checkpoint, or of views that are made of its tensors."""

    def __init__(self, folder: Path, owner_id: str) -> None:
        self._folder, self._id = folder / CONTENTS, owner_id

    def put(
        self, taken: Mapping[str, tuple[Segments, ...]], names: Collection[str] | None = None
    ) -> None:
        """Remember the segments of tensors by their lengths; earlier ones of others stay.

        `names` are of all the owner's tensors. Raises StorageFullError.
        """
        rows = {name: _row(name, levels) for name, levels in taken.items()}
        is_whole = names is not None and rows.keys() >= set(names)
        if rows and not is_whole:
            self._write(self._id + _PART, list(rows.values()))
        if names is not None and not is_whole and self.all_known() is None:
            is_whole = self.known().keys() >= set(names)
            rows = self._rows() if is_whole else rows
        if names is not None and is_whole:
            self._write(self._id, [rows[name] for name in names])

    def put_made(self, taken: Mapping[str, tuple[Segments, ...]]) -> None:
        """Remember the segments of views, which have no digests. Raises StorageFullError."""
        every = (_row(name, levels) for name, levels in taken.items())
        self._write(self._id + _PART, [(name, "", coarse, fine) for name, _, coarse, fine in every])

    def all_known(self) -> Mapping[str, str] | None:
        """Tensor name to digest of all tensors; None if some are not known."""
        for path in find_sealed(self._folder, self._id):
            if (digests := _digests(path, version(path))) is not None:
                return digests
        return None

    def known(self) -> Mapping[str, str]:
        """The digests of the tensors that are known."""
        known: dict[str, str] = {}
        for path in self._files():
            known |= _digests(path, version(path)) or {}
        return known

    def content_sha256(self) -> str | None:
        """One digest over all tensors' names and digests; None if some are not known."""
        for path in find_sealed(self._folder, self._id):
            if (sha256 := _content_sha256(path, version(path))) is not None:
                return sha256
        return None

    def segments(self, segment_elems: int) -> SegmentFiles:
        """The digests of segments of one length."""
        return SegmentFiles(self._files(), "coarse" if segment_elems == COARSE_ELEMS else "fine")

    def wrong_elements(self, entry: TensorEntry, read: Segments) -> str:
        """Say which elements of a tensor that was read are not as known, where segments are."""
        n = read.segment_elems
        recorded = self.segments(n)
        if entry.name not in recorded:
            return ""
        old = Segments(n, recorded[entry.name])
        count = len(read.digests) // SEGMENT_DIGEST_NBYTES
        wrong = [i for i in range(count) if read.of(i, i + 1) != old.of(i, i + 1)]
        if not wrong:
            return ""
        return f", elements {wrong[0] * n} to {min((wrong[-1] + 1) * n, entry.numel)}"

    def _files(self) -> list[Path]:
        return [*find_sealed(self._folder, self._id + _PART), *find_sealed(self._folder, self._id)]

    def _rows(self) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        for path in self._files():
            table = read_parts(path, SEGMENTS, lambda file: file.read_all(file.keys))
            for row in table.to_pylist() if table else ():
                if row["fine"] is not None or row["tensor"] not in rows:
                    rows[row["tensor"]] = (*row.values(),)
        return rows

    def _write(self, stem: str, rows: Sequence[Row]) -> None:
        write_sealed(
            self._folder, stem, encode_groups(SEGMENTS, _groups(rows), {}, compression="none")
        )


class SegmentFiles:
    """The digests of one checkpoint's segments. Safe for several threads.

    A file is open only while it is read: inputs have many, and a process may open few.
    """

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        self._lock = threading.Lock()
        self._columns = ["tensor", column]
        self._places: dict[str, tuple[Path, Key]] = {}
        self._held: dict[str, bytes] = {}
        for path in paths:  # a damaged file is not known, and found again before a merge
            names = read_parts(path, SEGMENTS, self._names) or {}
            self._places |= {name: (path, key) for name, key in names.items()}

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._places

    def __getitem__(self, tensor: str) -> bytes:
        """Return a tensor's digests, one after the other. Raises KeyError, CorruptionError."""
        with self._lock:
            if tensor not in self._held:
                path, key = self._places[tensor]
                try:
                    with RowGroups(path, SEGMENTS) as file:
                        table = file.read(key, self._columns)
                except FileNotFoundError:
                    raise damaged(path, "the file", "none") from None
                self._held = self._known(table)
            return self._held[tensor]

    def _names(self, file: RowGroups) -> dict[str, Key]:
        """The tensors of a file whose segments it has; all of it is checked."""
        return {name: key for key in file.keys for name in self._known(file.read(key))}

    def _known(self, table: pa.Table) -> dict[str, bytes]:
        rows = zip(*(table[column].to_pylist() for column in self._columns), strict=True)
        return {name: digests for name, digests in rows if digests is not None}


def refuse_changed(
    known: Mapping[str, str], checkpoint: Checkpoint, tensor: str, content: str
) -> None:
    """Raise CorruptionError if a tensor that was read has other content than is known."""
    if known.get(tensor, content) != content:
        raise CorruptionError(
            "An input's bytes are not those that were analysed",
            where=f"{checkpoint.root}, tensor {tensor}",
            expected=f"content {known[tensor][:16]}",
            found=f"{content[:16]}, in a file of the same size and time",
            next_step="if the file is damaged, copy it again; if it is another model, or the "
            "change is meant, give it a time of its own: `touch` it, or merge a copy that `cp -r` "
            "makes",
        )


def _row(name: str, levels: Sequence[Segments]) -> Row:
    """A tensor's row; a view may have segments of one length alone."""
    coarse, fine = (
        next(
            (level for level in levels if (level.segment_elems == COARSE_ELEMS) is is_coarse), None
        )
        for is_coarse in (True, False)
    )
    digest = coarse.content if coarse else ""
    return name, digest, coarse.digests if coarse else None, fine.digests if fine else None


def _groups(rows: Sequence[Row]) -> Iterator[tuple[Key, pa.Table]]:
    some: list[Row] = []
    nbytes = 0
    for number, row in enumerate(rows, 1):
        some.append(row)
        nbytes += len(row[2] or b"") + len(row[3] or b"")
        if nbytes >= _GROUP_NBYTES or number == len(rows):
            names, *columns = (list(column) for column in zip(*some, strict=True))
            yield tuple(names), pa.table([names, *columns], schema=SEGMENTS)
            some, nbytes = [], 0


# One verb asks several times for every checkpoint, and sensors at each tick.
@lru_cache(maxsize=512)
def _digests(path: Path, _version: tuple[int, int] | None) -> Mapping[str, str] | None:
    table = read_parts(path, SEGMENTS, lambda f: f.read_all(f.keys, ["tensor", "digest"]))
    if table is None:
        return None
    columns = (table[column].to_pylist() for column in table.column_names)
    return MappingProxyType(dict(zip(*columns, strict=True)))


@lru_cache(maxsize=1 << 14)
def _content_sha256(path: Path, seen: tuple[int, int] | None) -> str | None:
    digests = _digests(path, seen)
    return None if digests is None else digest_json(dict(digests))
