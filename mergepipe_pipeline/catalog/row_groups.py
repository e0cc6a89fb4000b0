"""Parquet files of the catalog that are read in parts: a row group has the rows of some keys.

The name seals the footer, and pages have checksums: what is decoded was checked, and nothing
besides is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from mergepipe_pipeline.catalog.arrow_tables import KEYS_KEY, Key, corruption_named, meta_of
from mergepipe_pipeline.catalog.seals import (
    MAGIC,
    check_seal,
    damaged,
    drop,
    footer_nbytes,
    readable,
    version,
)
from mergepipe_pipeline.errors import CorruptionError

_END_NBYTES = 8

T = TypeVar("T")


class RowGroups:
    """An open file of `encode_groups`; to be used in a `with`. `schema` None: whatever it has.

    Raises CorruptionError, here and while reading, for what is not as it was written, and
    FileNotFoundError.
    """

    def __init__(self, path: Path, schema: pa.Schema | None = None) -> None:
        self._path = path
        with readable(path):
            self._file = path.open("rb")
        try:
            footer = self._footer()
            with corruption_named(str(path)):
                metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer))
                self._parquet = pq.ParquetFile(
                    self._file,
                    metadata=metadata,
                    pre_buffer=False,
                    page_checksum_verification=True,
                )
                self.meta = meta_of(self._parquet, schema or self._parquet.schema_arrow)
                self.keys = tuple(map(_key, json.loads(metadata.metadata[KEYS_KEY])))
                if len(self.keys) != metadata.num_row_groups:
                    raise ValueError(f"{len(self.keys)} keys of {metadata.num_row_groups}")
        except BaseException:
            self._file.close()
            raise
        self._numbers = {key: number for number, key in enumerate(self.keys)}

    def __enter__(self) -> RowGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, key: Key, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of one of `keys`; only its bytes are read. Raises CorruptionError."""
        return self.read_all([key], columns)

    def read_all(self, keys: Iterable[Key], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of several keys, one after the other; see `read`."""
        numbers = [self._numbers[key] for key in keys]
        # Its threads sometimes end the process with an abort; who calls has threads of their own.
        with corruption_named(str(self._path)):
            return self._parquet.read_row_groups(numbers, columns, use_threads=False)

    def _footer(self) -> bytes:
        """Metadata, length and magic number at the end, as the name seals them."""
        with readable(self._path):
            file_nbytes = os.fstat(self._file.fileno()).st_size
            end = os.pread(self._file.fileno(), _END_NBYTES, max(0, file_nbytes - _END_NBYTES))
            nbytes = footer_nbytes(end, file_nbytes)
            if not nbytes:
                raise damaged(self._path, "a Parquet footer at the end", "other bytes")
            footer = os.pread(self._file.fileno(), nbytes, file_nbytes - nbytes)
        check_seal(self._path, footer, " of the footer")
        return footer


def read_parts(path: Path, schema: pa.Schema, read: Callable[[RowGroups], T]) -> T | None:
    """Return what `read` gives of a file; None if it is gone or damaged: see `seals.drop`."""
    seen = version(path)
    try:
        with RowGroups(path, schema) as file:
            return read(file)
    except FileNotFoundError:
        return None
    except CorruptionError as error:
        drop(path, error, seen)
        return None


def _key(key: Sequence[Any]) -> Key:
    return tuple(tuple(name) if isinstance(name, list) else name for name in key)
