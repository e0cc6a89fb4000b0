"""Facts to Parquet bytes and back. Equal facts give equal bytes; nothing here opens a file."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.checkpoint import Checkpoint, FileEntry, TensorEntry
from mergepipe_pipeline.spec.stats import ExpertStats, TensorStats

_FACTS = b"mergepipe"

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
DIGESTS = pa.schema([("tensor", pa.string()), ("sha256", pa.string())])
TENSOR_STATS = pa.schema(
    [
        ("tensor", pa.string()),
        ("base_tensor", pa.string()),
        ("sha256", pa.string()),
        ("base_sha256", pa.string()),
        ("numel", pa.int64()),
        ("l1", pa.float64()),
        ("l2sq", pa.float64()),
        ("max_abs", pa.float64()),
        ("nonzero", pa.int64()),
        ("hist_bins", pa.list_(pa.uint16())),
        ("hist_counts", pa.list_(pa.int64())),
        ("sketch", pa.list_(pa.float32())),
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
    pq.write_table(table.replace_schema_metadata({_FACTS: packed}), sink, compression="zstd")
    return sink.getvalue()


def decode(data: bytes, where: str, schema: pa.Schema) -> tuple[pa.Table, dict[str, Any]]:
    """The table and metadata of `encode`. Raises CorruptionError naming `where`.

    A table that has not exactly the columns of `schema` counts as damaged.
    """
    try:
        table = pq.read_table(io.BytesIO(data))
        meta = json.loads(table.schema.metadata[_FACTS])
        if not table.schema.equals(schema):
            raise ValueError(f"columns {', '.join(table.column_names)}")
        return table, meta
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
        TensorEntry(r["tensor"], r["dtype"], tuple(r["shape"]), r["file"], r["start_byte"])
        for r in table.to_pylist()
    )
    return Checkpoint(
        name,
        root,
        tuple(FileEntry(*f) for f in meta["files"]),
        tensors,
        meta["config"],
        # Catalogs of version 0.1 hold full checkpoints only and say neither.
        meta.get("kind", "full"),
        meta.get("adapter_config"),
    )


def encode_digests(digests: Mapping[str, str]) -> bytes:
    """Tensor to SHA-256."""
    rows = {"tensor": list(digests), "sha256": list(digests.values())}
    return encode(pa.table(rows, schema=DIGESTS), {})


def decode_digests(data: bytes, where: str) -> dict[str, str]:
    """The mapping of `encode_digests`. Raises CorruptionError."""
    table, _ = decode(data, where, DIGESTS)
    return dict(zip(table["tensor"].to_pylist(), table["sha256"].to_pylist(), strict=True))


def encode_stats(stats: ExpertStats) -> tuple[bytes, bytes]:
    """Parquet bytes of the tensor rows and of the block rows, in the same order of tensors."""
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
        }
        if ts
        else {name: [] for name in BLOCK_STATS.names},
        schema=BLOCK_STATS,
    )
    return encode(tensors, meta), encode(blocks, meta)


def decode_stats(
    tensors: bytes, blocks: bytes, tensors_where: str, blocks_where: str
) -> ExpertStats:
    """The statistics of `encode_stats`. Raises CorruptionError."""
    table, meta = decode(tensors, tensors_where, TENSOR_STATS)
    block_table, _ = decode(blocks, blocks_where, BLOCK_STATS)
    arrays = {c: block_table[c].to_numpy() for c in ("l2sq", "max_abs", "nonzero")}
    grid = BlockGrid(meta["block_elems"])
    out, a = [], 0
    for r in table.to_pylist():
        b = a + grid.count(r["numel"])
        r["hist_bins"] = np.array(r["hist_bins"], np.uint16)
        r["hist_counts"] = np.array(r["hist_counts"], np.int64)
        r["sketch"] = np.array(r["sketch"], np.float32)
        out.append(TensorStats(**r, **{f"block_{c}": v[a:b] for c, v in arrays.items()}))
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


def encode_facts(facts: Mapping[str, tuple[float, ...]], key: str) -> bytes:
    """Tensor-scope facts of one key: tensor to numbers."""
    rows = {"tensor": list(facts), "numbers": [list(map(float, f)) for f in facts.values()]}
    return encode(pa.table(rows, schema=FACTS), {"key": key})


def decode_facts(data: bytes, where: str) -> dict[str, tuple[float, ...]]:
    """The mapping of `encode_facts`. Raises CorruptionError."""
    table, _ = decode(data, where, FACTS)
    numbers = table["numbers"].to_pylist()
    return dict(zip(table["tensor"].to_pylist(), map(tuple, numbers), strict=True))
