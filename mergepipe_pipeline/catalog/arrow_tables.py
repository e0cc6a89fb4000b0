"""Facts to Parquet bytes and back. Equal facts give equal bytes; nothing here opens a file."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from sys import intern
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mergepipe_pipeline.domain.checkpoint import Checkpoint, FileEntry, TensorEntry
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.side_files import SideStamp

FACTS_KEY = b"mergepipe"
#: Columns of noise.
NOISE = ("sketch", "sample")

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
DIGESTS = pa.schema([("tensor", pa.string()), ("digest", pa.string())])
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
    """Parquet bytes of a table with JSON metadata."""
    packed = json.dumps(meta, sort_keys=True).encode()
    sink = io.BytesIO()
    # Sketches and samples are noise, which a dictionary and compression only make slower to read;
    # and as numbers of 16 bits they would take 32 in Parquet.
    noise = [c for c in NOISE if c in table.column_names]
    plain = [c for c in table.column_names if c not in NOISE]
    pq.write_table(
        table.replace_schema_metadata({FACTS_KEY: packed}),
        sink,
        compression=dict.fromkeys(plain, "zstd") | dict.fromkeys(noise, "none"),
        use_dictionary=[c for c in plain if pa.types.is_string(table.schema.field(c).type)],
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
        # Catalogs of version 0.1 have no probes.
        tuple(FileEntry(*f, *[""] * (5 - len(f))) for f in meta["files"]),
        tensors,
        meta["config"],
        # Catalogs of version 0.1 hold full checkpoints only and say neither.
        meta.get("kind", "full"),
        meta.get("adapter_config"),
    )


def encode_digests(digests: Mapping[str, str]) -> bytes:
    """Tensor to digest."""
    rows = {"tensor": list(digests), "digest": list(digests.values())}
    return encode(pa.table(rows, schema=DIGESTS), {})


def decode_digests(data: bytes, where: str) -> dict[str, str]:
    """The mapping of `encode_digests`. Raises CorruptionError."""
    table, _ = decode(data, where, DIGESTS)
    return dict(zip(table["tensor"].to_pylist(), table["digest"].to_pylist(), strict=True))


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
