"""Facts to Parquet bytes and back. Equal facts give equal bytes; nothing here opens a file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from sys import intern
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mergepipe_pipeline.catalog.seals import seal_of
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.checkpoint import Checkpoint, FileEntry, TensorEntry
from mergepipe_pipeline.spec.stats import SAMPLE_WIDTH, SKETCH_WIDTH, ExpertStats, TensorStats
from mergepipe_pipeline.storage.side_files import SideStamp

FACTS_KEY = b"mergepipe"
_NOISE = ("sketch", "sample")

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
TENSOR_STATS = pa.schema(
    [
        ("tensor", pa.string()),
        ("base_tensor", pa.string()),
        ("digest", pa.string()),
        ("base_digest", pa.string()),
        ("dtype", pa.string()),
        ("base_dtype", pa.string()),
        ("numel", pa.int64()),
        ("l1", pa.float64()),
        ("l2sq", pa.float64()),
        ("max_abs", pa.float64()),
        ("nonzero", pa.int64()),
        ("hist_bins", pa.list_(pa.uint16())),
        ("hist_counts", pa.list_(pa.int64())),
    ]
)
BLOCK_STATS = pa.schema(
    [
        ("tensor", pa.string()),
        ("base_tensor", pa.string()),
        ("block", pa.int64()),
        ("l2sq", pa.float64()),
        ("max_abs", pa.float32()),
        ("nonzero", pa.int64()),
        ("positive", pa.int64()),
        ("sketch", pa.binary(2 * SKETCH_WIDTH)),
        ("sample", pa.binary(2 * SAMPLE_WIDTH)),
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
    noise = [c for c in _NOISE if c in table.column_names]
    plain = [c for c in table.column_names if c not in _NOISE]
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


def encode_stats(
    stats: ExpertStats,
    magnitudes_seal: str | None = None,
    seal_blocks: Callable[[bytes], str] = seal_of,
) -> tuple[bytes, bytes]:
    """Parquet bytes of the tensor rows and of the block rows, in the same order of tensors.

    The tensor rows name the seals of the other files of their analysis.
    """
    ts = stats.tensors
    meta = {
        "base_id": stats.base_id,
        "checkpoint_id": stats.checkpoint_id,
        "block_elems": stats.block_elems,
    }
    columns = TENSOR_STATS.names
    tensors = pa.table({c: [getattr(t, c) for t in ts] for c in columns}, schema=TENSOR_STATS)
    counts = [len(t.block_l2sq) for t in ts]

    def repeated(names: list[str]) -> Any:
        return np.repeat(np.array(names, dtype=object), counts)

    blocks = pa.table(
        {
            "tensor": repeated([t.tensor for t in ts]),
            "base_tensor": repeated([t.base_tensor for t in ts]),
            "block": np.concatenate([np.arange(n) for n in counts]),
            "l2sq": np.concatenate([t.block_l2sq for t in ts]),
            "max_abs": np.concatenate([t.block_max_abs for t in ts]),
            "nonzero": np.concatenate([t.block_nonzero for t in ts]),
            "positive": np.concatenate([t.block_positive for t in ts]),
            "sketch": _packed([t.block_sketch for t in ts], SKETCH_WIDTH),
            "sample": _packed([t.block_sample for t in ts], SAMPLE_WIDTH),
        }
        if ts
        else {name: [] for name in BLOCK_STATS.names},
        schema=BLOCK_STATS,
    )
    packed = encode(blocks, meta)
    seals = {"blocks": seal_blocks(packed), "magnitudes": magnitudes_seal}
    return encode(tensors, meta | seals), packed


def decode_pairs(data: bytes, where: str) -> tuple[frozenset[tuple[str, str]], str, str | None]:
    """The (expert's tensor, base's tensor) of tensor rows, and two seals that they name.

    These are of the files of blocks and of magnitudes, if any. Raises CorruptionError.
    """
    columns = ("tensor", "base_tensor")
    table, meta = decode(data, where, TENSOR_STATS, columns)
    mine, theirs = (table[c].to_pylist() for c in columns)
    with corruption_named(where):
        return frozenset(zip(mine, theirs, strict=True)), meta["blocks"], meta["magnitudes"]


def decode_stats(
    tensors: bytes,
    blocks: bytes,
    tensors_where: str,
    blocks_where: str,
    without: Collection[str] = (),
) -> ExpertStats:
    """The statistics of `encode_stats`, some columns left empty. Raises CorruptionError."""
    wide = () if "hist" in without else ("hist_bins", "hist_counts")
    scalars = [c for c in TENSOR_STATS.names if not c.startswith("hist_")]
    table, meta = decode(tensors, tensors_where, TENSOR_STATS, (*scalars, *wide))
    plain = ("l2sq", "max_abs", "nonzero", "positive")
    noise = tuple(c for c in _NOISE if c not in without)
    block_table, _ = decode(blocks, blocks_where, BLOCK_STATS, (*plain, *noise))
    arrays = {c: _numbers(block_table[c]) for c in plain}
    for column, width in zip(_NOISE, (SKETCH_WIDTH, SAMPLE_WIDTH), strict=True):
        known = column in noise
        arrays[column] = (
            _unpacked(block_table[column], width) if known else np.zeros((0, width), np.uint16)
        )
    none = np.zeros(0, np.uint16), np.zeros(0, np.int64)
    histograms = [_split(table[c]) for c in wide] or [[empty] * len(table) for empty in none]
    rows = table.select(scalars).to_pylist()
    grid = BlockGrid(meta["block_elems"])
    out, a = [], 0
    for r, hist_bins, hist_counts in zip(rows, *histograms, strict=True):
        b = a + grid.count(r["numel"])
        per_block = {f"block_{c}": v[a:b] for c, v in arrays.items()}
        out.append(TensorStats(**r, hist_bins=hist_bins, hist_counts=hist_counts, **per_block))
        a = b
    if a != len(block_table):
        raise CorruptionError(
            "Two catalog files disagree",
            where=blocks_where,
            expected=f"{a} blocks, as {tensors_where} implies",
            found=f"{len(block_table)} blocks",
            next_step="delete both files; `mergepipe analyze` makes them again",
        )
    return ExpertStats(meta["base_id"], meta["checkpoint_id"], meta["block_elems"], tuple(out))


def _packed(parts: Sequence[npt.NDArray[np.uint16]], width: int) -> pa.FixedSizeBinaryArray:
    """Rows of `width` numbers as little-endian bytes."""
    rows = np.concatenate(parts).astype("<u2")
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(2 * width), len(rows), [None, pa.py_buffer(rows.tobytes())]
    )


def _unpacked(column: pa.ChunkedArray, width: int) -> npt.NDArray[np.uint16]:
    """The rows of `_packed`."""
    chunks = [
        np.frombuffer(c.buffers()[1], "<u2").reshape(-1, width)[c.offset : c.offset + len(c)]
        for c in column.chunks
        if len(c)
    ]
    if not chunks:
        return np.zeros((0, width), np.uint16)
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def _numbers(column: pa.ChunkedArray) -> Any:
    """A column without nulls as it lies; `to_numpy` of a column imports pandas where it is."""
    chunks = [np.from_dlpack(c) for c in column.chunks]
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def _split(column: pa.ChunkedArray) -> list[npt.NDArray[Any]]:
    """The lists of a column as arrays."""
    lists = column.combine_chunks()
    values, edges = np.from_dlpack(lists.values), np.from_dlpack(lists.offsets)
    return [values[a:b] for a, b in pairwise(edges)]


def decode_rows(data: bytes, where: str, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """Some columns of tensor statistics, as rows. Raises CorruptionError."""
    table, _ = decode(data, where, TENSOR_STATS, columns)
    return list(zip(*(table[c].to_pylist() for c in columns), strict=True))


def encode_facts(facts: Mapping[str, tuple[float, ...]], key: str) -> bytes:
    """Tensor-scope facts of one key: tensor to numbers."""
    rows = {"tensor": list(facts), "numbers": [list(map(float, f)) for f in facts.values()]}
    return encode(pa.table(rows, schema=FACTS), {"key": key})


def decode_facts(data: bytes, where: str) -> dict[str, tuple[float, ...]]:
    """The mapping of `encode_facts`. Raises CorruptionError."""
    table, _ = decode(data, where, FACTS)
    numbers = table["numbers"].to_pylist()
    return dict(zip(table["tensor"].to_pylist(), map(tuple, numbers), strict=True))
