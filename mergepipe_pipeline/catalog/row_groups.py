"""Sealed Parquet files that are read in parts: a row group per key, checked when it is read.

The name seals the footer, and the footer holds where each row group lies with its digest; so every
byte that is decoded was checked, and none besides is read.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from mergepipe_pipeline.catalog.arrow_tables import FACTS_KEY, corruption_named, meta_of
from mergepipe_pipeline.catalog.seals import (
    check_seal,
    damaged,
    place_of,
    readable,
    seal_of,
    write_sealed,
)
from mergepipe_pipeline.text import listed

#: What a row group is asked for by.
Key = tuple[str, ...]

_GROUPS_KEY = b"mergepipe.row_groups"
_MAGIC = b"PAR1"
#: The footer's length and the magic number.
_END_NBYTES = 8


class _Group(NamedTuple):
    """Where in the file a row group lies, and the digest of its bytes."""

    key: Key
    start: int
    stop: int
    digest: str


def encode_groups(
    schema: pa.Schema,
    groups: Iterable[tuple[Key, pa.Table]],
    meta: Mapping[str, Any],
    *,
    compression: str = "lz4",
    encoding: Mapping[str, str] | None = None,
) -> bytes:
    """Parquet bytes with a row group per key, in order; equal facts give equal bytes.

    `encoding` is Parquet's by column path. Keys differ, and no table is empty.
    """
    packed = json.dumps(meta, sort_keys=True).encode()
    sink = io.BytesIO()
    placed: list[_Group] = []
    with pq.ParquetWriter(
        sink,
        schema.with_metadata({FACTS_KEY: packed}),
        compression=compression,
        use_dictionary=False,
        column_encoding=dict(encoding) if encoding else None,
    ) as writer:
        stop = 0  # the magic number goes with the first
        for key, table in groups:
            writer.write_table(table, row_group_size=len(table))
            start, stop = stop, sink.tell()
            with sink.getbuffer() as written:
                placed.append(_Group(key, start, stop, seal_of(written[start:stop])))
        writer.add_key_value_metadata({_GROUPS_KEY: json.dumps(placed).encode()})
    return sink.getvalue()


def write_groups(folder: Path, stem: str, data: bytes) -> Path:
    """Write bytes of `encode_groups` under their seal. Raises StorageFullError."""
    return write_sealed(folder, stem, data, seal_of(footer_of(data), place_of(folder, stem)))


def footer_of(data: bytes) -> memoryview:
    """What the name of a file with the bytes of `encode_groups` seals."""
    nbytes = int.from_bytes(data[-_END_NBYTES:-4], "little") + _END_NBYTES
    return memoryview(data)[-nbytes:]


class RowGroups:
    """An open file of `write_groups`; to be used in a `with`. `schema` None: whatever it has.

    Raises CorruptionError, here and while reading, for what is not as it was written, and
    FileNotFoundError.
    """

    def __init__(self, path: Path, schema: pa.Schema | None) -> None:
        self._path = path
        with readable(path):
            self._file = path.open("rb")
        try:
            self._nbytes = os.fstat(self._file.fileno()).st_size
            footer = self._footer()
            with corruption_named(str(path)):
                # A file that is a footer alone has the metadata of the whole.
                parquet = pq.ParquetFile(pa.BufferReader(_MAGIC + footer))
                self.meta = meta_of(parquet, schema or parquet.schema_arrow)
                self._metadata = parquet.metadata
                rows = json.loads(self._metadata.metadata[_GROUPS_KEY])
                groups = [_Group(tuple(map(str, key)), *rest) for key, *rest in rows]
                if not all(0 <= g.start <= g.stop <= self._nbytes for g in groups):
                    raise ValueError("row groups outside the file")
                if len(groups) != self._metadata.num_row_groups:
                    raise ValueError(f"{len(groups)} keys of {self._metadata.num_row_groups}")
        except BaseException:
            self._file.close()
            raise
        self._groups = {group.key: (number, group) for number, group in enumerate(groups)}

    def __enter__(self) -> RowGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys in the file's order."""
        return tuple(self._groups)

    def read(self, key: Key) -> pa.Table:
        """The rows of one of `keys`; only its bytes are read. Raises CorruptionError."""
        number, group = self._groups[key]
        data = self._bytes(group.start, group.stop)
        if seal_of(data) != group.digest:
            raise damaged(
                self._path, f"BLAKE3 {group.digest} of the rows of {listed(key, 1)}", seal_of(data)
            )
        with corruption_named(str(self._path)):
            part = _Part(data, group.start, self._nbytes)
            parquet = pq.ParquetFile(part, metadata=self._metadata, pre_buffer=False)
            return parquet.read_row_group(number, use_threads=False)

    def _footer(self) -> bytes:
        """Metadata, length and magic number at the end, as the name seals them."""
        end = self._bytes(self._nbytes - _END_NBYTES, self._nbytes)
        nbytes = int.from_bytes(end[:4], "little") + _END_NBYTES
        if nbytes > self._nbytes:
            raise damaged(self._path, "a Parquet footer at the end", "other bytes")
        footer = self._bytes(self._nbytes - nbytes, self._nbytes)
        check_seal(self._path, footer, " of the footer")
        return footer

    def _bytes(self, start: int, stop: int) -> bytes:
        with readable(self._path):
            data = b"" if start < 0 else os.pread(self._file.fileno(), stop - start, start)
        if start < 0 or len(data) < stop - start:
            raise damaged(self._path, f"bytes {start} to {stop}", f"{self._nbytes} bytes in all")
        return data


class _Part(io.RawIOBase):
    """A file of which only one checked part can be read."""

    def __init__(self, data: bytes, start: int, nbytes: int) -> None:
        self._data, self._start, self._nbytes, self._at = data, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        start = self._at - self._start
        if start < 0 or start + len(target) > len(self._data):
            raise OSError(f"{len(target)} bytes at {self._at} are outside the row group")
        target[:] = self._data[start : start + len(target)]
        self._at += len(target)
        return len(target)
