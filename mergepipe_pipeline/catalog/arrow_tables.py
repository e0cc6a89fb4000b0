"""Facts to Parquet bytes and back. Equal facts give equal bytes; nothing here opens a file."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from sys import intern
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mergepipe_pipeline.catalog.seals import BODY_KEY, body_digest
from mergepipe_pipeline.domain.checkpoint import Checkpoint, FileEntry, TensorEntry
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.side_files import SideStamp

FACTS_KEY = b"mergepipe"
#: Key in a footer of the keys of its row groups.
KEYS_KEY = b"mergepipe.row_groups"
#: The names of a row group's rows; a name may be of several parts.
Key = tuple[Any, ...]

TENSORS = pa.schema(
    [
        ("tensor", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("file", pa.string()),
        ("start_byte", pa.int64()),
        ("numel", pa.int64()),
        ("nbytes", pa.int64()),
    ]
)
SIDE_FILES = pa.schema(
    [
        ("file", pa.string()),
        ("nbytes", pa.int64()),
        ("mtime_ns", pa.int64()),
        ("sha256", pa.string()),
    ]
)
FACTS = pa.schema(
    [
        ("tensor", pa.string()),
        ("numbers", pa.list_(pa.float64())),
    ]
)


def encode(table: pa.Table, meta: Mapping[str, Any]) -> bytes:
    """Parquet bytes of a table with JSON metadata, to be read at once."""
    return encode_groups(table.schema, [((), table)], meta)


def encode_groups(
    schema: pa.Schema,
    groups: Iterable[tuple[Key, pa.Table]],
    meta: Mapping[str, Any],
    *,
    compression: str | dict[str, str] = "zstd",
    encoding: Mapping[str, str] | None = None,
) -> bytes:
    """Parquet bytes with a row group per key, in order; equal facts give equal bytes.

    `compression` and `encoding` are Parquet's, by column path. Keys differ.
    """
    sink = io.BytesIO()
    encoded = {column.partition(".")[0] for column in encoding or ()}
    texts = [f.name for f in schema if pa.types.is_string(f.type) and f.name not in encoded]
    keys: list[Key] = []
    with pq.ParquetWriter(
        sink,
        schema.with_metadata({FACTS_KEY: json.dumps(meta, sort_keys=True).encode()}),
        compression=compression,
        use_dictionary=texts,
        column_encoding=dict(encoding) if encoding else None,
        write_page_checksum=True,
    ) as writer:
        for key, table in groups:
            writer.write_table(table, row_group_size=max(1, len(table)))
            keys.append(key)
        with sink.getbuffer() as body:
            digest = body_digest(body)
        writer.add_key_value_metadata(
            {KEYS_KEY: json.dumps(keys).encode(), BODY_KEY: digest.encode()}
        )
    return sink.getvalue()


def decode(
    data: bytes, where: str, schema: pa.Schema, columns: Sequence[str] | None = None
) -> tuple[pa.Table, dict[str, Any]]:
    """The table (or some columns of it) and metadata of `encode`.

    Raises CorruptionError naming `where`; a table that has not exactly the columns of `schema`
    counts as damaged.
    """
    with corruption_named(where):
        file = pq.ParquetFile(pa.BufferReader(data))
        meta = meta_of(file, schema)
        # Its threads sometimes end the process with an abort; who calls has threads of their own.
        return file.read(columns, use_threads=False), meta


def meta_of(file: pq.ParquetFile, schema: pa.Schema) -> dict[str, Any]:
    """The JSON metadata of a file. Raises ValueError if its columns are not those of `schema`."""
    if not file.schema_arrow.equals(schema):
        raise ValueError(f"columns {', '.join(file.schema_arrow.names)}")
    meta: dict[str, Any] = json.loads(file.schema_arrow.metadata[FACTS_KEY])
    return meta


@contextmanager
def corruption_named(where: str) -> Iterator[None]:
    """Turn what a damaged file makes its readers say into a CorruptionError that names `where`."""
    try:
        yield
    except pa.ArrowMemoryError:  # which says nothing about the file
        raise
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptionError(
            "A catalog file cannot be read",
            where=where,
            expected="a Parquet file of mergepipe",
            found=str(error).splitlines()[0][:200],
            next_step="delete the file; `mergepipe analyze` makes it again",
        ) from error


def encode_checkpoint(c: Checkpoint) -> bytes:
    """Tensor entries as rows; files, kind and configs in the metadata; name and root nowhere."""
    rows = {
        "tensor": [t.name for t in c.tensors],
        "dtype": [t.dtype for t in c.tensors],
        "shape": [list(t.shape) for t in c.tensors],
        "file": [t.file for t in c.tensors],
        "start_byte": [t.start_byte for t in c.tensors],
        "numel": [t.numel for t in c.tensors],
        "nbytes": [t.nbytes for t in c.tensors],
    }
    files = [[f.path, f.nbytes, f.mtime_ns, f.header_sha256, f.probe_sha256] for f in c.files]
    meta = {
        "files": files,
        "config": c.config,
        "kind": c.kind,
        "adapter_config": c.adapter_config,
    }
    return encode(pa.table(rows, schema=TENSORS), meta)


def decode_checkpoint(data: bytes, where: str, name: str, root: str) -> Checkpoint:
    """The checkpoint of `encode_checkpoint`, registered as `name` at `root`.

    Raises CorruptionError.
    """
    table, meta = decode(data, where, TENSORS)
    tensors = tuple(
        TensorEntry(  # many are kept at once, of one architecture
            intern(r["tensor"]),
            intern(r["dtype"]),
            tuple(r["shape"]),
            intern(r["file"]),
            r["start_byte"],
        )
        for r in table.to_pylist()
    )
    return Checkpoint(
        name,
        root,
        tuple(FileEntry(*f) for f in meta["files"]),
        tensors,
        meta["config"],
        meta["kind"],
        meta["adapter_config"],
    )


def encode_side_files(digests: Mapping[SideStamp, str]) -> bytes:
    """Digests of files beside the weights, with the sizes and times that they had."""
    rows = [(*stamp, digest) for stamp, digest in digests.items()]
    columns = dict(zip(SIDE_FILES.names, zip(*rows, strict=True), strict=True))
    return encode(pa.table(columns, schema=SIDE_FILES), {})


def decode_side_files(data: bytes, where: str) -> dict[SideStamp, str]:
    """The mapping of `encode_side_files`. Raises CorruptionError."""
    table, _ = decode(data, where, SIDE_FILES)
    columns = (table[c].to_pylist() for c in SIDE_FILES.names)
    return {SideStamp(*stamp): sha256 for *stamp, sha256 in zip(*columns, strict=True)}


def encode_facts(facts: Mapping[str, tuple[float, ...]], key: str) -> bytes:
    """Tensor-scope facts of one key: tensor to numbers."""
    rows = {"tensor": list(facts), "numbers": [list(map(float, f)) for f in facts.values()]}
    return encode(pa.table(rows, schema=FACTS), {"key": key})


def decode_facts(data: bytes, where: str) -> dict[str, tuple[float, ...]]:
    """The mapping of `encode_facts`. Raises CorruptionError."""
    table, _ = decode(data, where, FACTS)
    numbers = table["numbers"].to_pylist()
    return dict(zip(table["tensor"].to_pylist(), map(tuple, numbers), strict=True))
