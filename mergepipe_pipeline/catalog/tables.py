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
        ("block", pa.int64()),
        ("l2sq", pa.float64()),
        ("max_abs", pa.float32()),
        ("nonzero", pa.int64()),
    ]
)
FACTS = pa.schema(
    [
        ("tensor", pa.string()),
        ("threshold_bits", pa.int64()),
        ("tie_stop_elem", pa.int64()),
        ("scale", pa.float64()),
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
    """Tensor entries as rows; name, root, files and config in the metadata."""
    rows = {
        "tensor": [t.name for t in c.tensors],
        "dtype": [t.dtype for t in c.tensors],
        "shape": [list(t.shape) for t in c.tensors],
        "file": [t.file for t in c.tensors],
        "start_byte": [t.start_byte for t in c.tensors],
        "numel": [t.numel for t in c.tensors],
        "nbytes": [t.nbytes for t in c.tensors],
    }
    files = [[f.path, f.nbytes, f.mtime_ns, f.header_sha256] for f in c.files]
    return encode(pa.table(rows, schema=TENSORS), {"files": files, "config": c.config})


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
        name, root, tuple(FileEntry(*f) for f in meta["files"]), tensors, meta["config"]
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
    """Parquet bytes of the tensor rows and of the block rows."""
    ts = stats.tensors
    meta = {
        "base_id": stats.base_id,
        "checkpoint_id": stats.checkpoint_id,
        "block_elems": stats.block_elems,
    }
    tensors = pa.table(
        {
            "tensor": [t.tensor for t in ts],
            "sha256": [t.sha256 for t in ts],
            "base_sha256": [t.base_sha256 for t in ts],
            "numel": [t.numel for t in ts],
            "l1": [t.l1 for t in ts],
            "l2sq": [t.l2sq for t in ts],
            "max_abs": [t.max_abs for t in ts],
            "nonzero": [t.nonzero for t in ts],
            "hist_bins": [t.hist_bins for t in ts],
            "hist_counts": [t.hist_counts for t in ts],
            "sketch": [t.sketch for t in ts],
        },
        schema=TENSOR_STATS,
    )
    counts = [len(t.block_l2sq) for t in ts]
    blocks = pa.table(
        {
            "tensor": np.repeat(np.array([t.tensor for t in ts], dtype=object), counts)
            if ts
            else [],
            "block": np.concatenate([np.arange(n) for n in counts]) if ts else [],
            "l2sq": np.concatenate([t.block_l2sq for t in ts]) if ts else [],
            "max_abs": np.concatenate([t.block_max_abs for t in ts]) if ts else [],
            "nonzero": np.concatenate([t.block_nonzero for t in ts]) if ts else [],
        },
        schema=BLOCK_STATS,
    )
    return encode(tensors, meta), encode(blocks, meta)


def decode_stats(
    tensors: bytes, blocks: bytes, tensors_where: str, blocks_where: str
) -> ExpertStats:
    """The statistics of `encode_stats`. Raises CorruptionError."""
    table, meta = decode(tensors, tensors_where, TENSOR_STATS)
    block_table, _ = decode(blocks, blocks_where, BLOCK_STATS)
    l2sq, max_abs = block_table["l2sq"].to_numpy(), block_table["max_abs"].to_numpy()
    nonzero = block_table["nonzero"].to_numpy()
    firsts = np.flatnonzero(block_table["block"].to_numpy() == 0).tolist()
    owners = block_table["tensor"].take(pa.array(firsts, pa.int64())).to_pylist()
    stops = [*firsts[1:], len(l2sq)][: len(firsts)]
    parts = dict(zip(owners, zip(firsts, stops, strict=True), strict=True))
    out = []
    for r in table.to_pylist():
        a, b = parts.get(r["tensor"], (0, 0))
        out.append(
            TensorStats(
                r["tensor"],
                r["sha256"],
                r["base_sha256"],
                r["numel"],
                r["l1"],
                r["l2sq"],
                r["max_abs"],
                r["nonzero"],
                np.array(r["hist_bins"], np.uint16),
                np.array(r["hist_counts"], np.int64),
                np.array(r["sketch"], np.float32),
                l2sq[a:b],
                max_abs[a:b],
                nonzero[a:b],
            )
        )
    return ExpertStats(meta["base_id"], meta["checkpoint_id"], meta["block_elems"], tuple(out))


def encode_facts(facts: Mapping[str, tuple[int, int, float]], key: str) -> bytes:
    """Tensor-scope facts of one key."""
    rows = {
        "tensor": list(facts),
        "threshold_bits": [f[0] for f in facts.values()],
        "tie_stop_elem": [f[1] for f in facts.values()],
        "scale": [f[2] for f in facts.values()],
    }
    return encode(pa.table(rows, schema=FACTS), {"key": key})


def decode_facts(data: bytes, where: str) -> dict[str, tuple[int, int, float]]:
    """The mapping of `encode_facts`. Raises CorruptionError."""
    table, _ = decode(data, where, FACTS)
    return {
        r["tensor"]: (r["threshold_bits"], r["tie_stop_elem"], r["scale"])
        for r in table.to_pylist()
    }
