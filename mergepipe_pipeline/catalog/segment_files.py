"""Digests of segments in files, by checkpoint; a row group holds those of some tensors.

A merge asks for one tensor after the other in the checkpoint's order: it holds one row group of
each input. `domain.segments` says what a segment is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from mergepipe_pipeline.catalog.formats import SEGMENTS
from mergepipe_pipeline.catalog.row_groups import Key, RowGroups, encode_groups, write_groups
from mergepipe_pipeline.catalog.seals import damaged, drop, find_sealed, version
from mergepipe_pipeline.errors import CorruptionError

_SCHEMA = pa.schema([("tensor", pa.string()), ("digests", pa.binary())])
#: Of digests in a row group: those of 1 GiB of bfloat16.
_GROUP_NBYTES = 1 << 18


def put_segments(
    folder: Path, owner_id: str, segment_elems: int, digests: Mapping[str, bytes]
) -> None:
    """Remember the digests of tensors' segments; earlier ones of other tensors stay.

    `folder` is the catalog's, `owner_id` that of a checkpoint. Raises StorageFullError.
    """
    if digests:
        data = encode_groups(_SCHEMA, _groups(digests), {}, compression="none")
        write_groups(folder / SEGMENTS, _stem(owner_id, segment_elems), data)


def _groups(digests: Mapping[str, bytes]) -> Iterator[tuple[Key, pa.Table]]:
    names: list[str] = []
    nbytes = 0
    for number, (name, its) in enumerate(digests.items(), 1):
        names.append(name)
        nbytes += len(its)
        if nbytes >= _GROUP_NBYTES or number == len(digests):
            rows = {"tensor": names, "digests": [digests[n] for n in names]}
            yield tuple(names), pa.table(rows, schema=_SCHEMA)
            names, nbytes = [], 0


class SegmentFiles:
    """The digests of one checkpoint's segments. Safe for several threads.

    A file is open only while it is read: inputs have many, and a process may open few.
    """

    def __init__(self, folder: Path, owner_id: str, segment_elems: int) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, tuple[Path, Key]] = {}
        self._held: tuple[Key, dict[str, bytes]] = ((), {})
        for path in find_sealed(folder / SEGMENTS, _stem(owner_id, segment_elems)):
            seen = version(path)
            try:
                with RowGroups(path, _SCHEMA) as file:
                    for key in file.keys:
                        file.read(key)  # a damaged one is not known, and found again before a merge
                        self._places |= dict.fromkeys(key, (path, key))
            except FileNotFoundError:
                continue
            except CorruptionError as error:
                drop(path, error, seen)

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._places

    def __getitem__(self, tensor: str) -> bytes:
        """Those of a tensor, one after the other. Raises KeyError, CorruptionError."""
        with self._lock:
            if tensor not in self._held[1]:
                path, key = self._places[tensor]
                try:
                    with RowGroups(path, _SCHEMA) as file:
                        table = file.read(key)
                except FileNotFoundError:
                    raise damaged(path, "the file", "none") from None
                values = (table[c].to_pylist() for c in _SCHEMA.names)
                self._held = (key, dict(zip(*values, strict=True)))
            return self._held[1][tensor]


def _stem(owner_id: str, segment_elems: int) -> str:
    return f"{owner_id}.e{segment_elems}"
