"""Statistics to Parquet bytes and back: a table of tensors and one of blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mergepipe_pipeline.arrays import I64Array, U16Array
from mergepipe_pipeline.catalog.arrow_tables import NOISE, corruption_named, decode, encode
from mergepipe_pipeline.catalog.seals import seal_of
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.stats import SAMPLE_WIDTH, SKETCH_WIDTH, ExpertStats, TensorStats
from mergepipe_pipeline.errors import CorruptionError

#: Bins and their counts, as `TensorStats` has them.
Histogram = tuple[U16Array, I64Array]
_HISTOGRAM = ("hist_bins", "hist_counts")

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
    tensors, base_tensors = (table[c].to_pylist() for c in columns)
    with corruption_named(where):
        return (
            frozenset(zip(tensors, base_tensors, strict=True)),
            meta["blocks"],
            meta["magnitudes"],
        )


def decode_stats(
    tensors: bytes,
    blocks: bytes,
    tensors_where: str,
    blocks_where: str,
    without: Collection[str] = (),
) -> ExpertStats:
    """The statistics of `encode_stats`, some columns left empty. Raises CorruptionError."""
    wide = () if "hist" in without else _HISTOGRAM
    scalars = [c for c in TENSOR_STATS.names if not c.startswith("hist_")]
    table, meta = decode(tensors, tensors_where, TENSOR_STATS, (*scalars, *wide))
    plain = ("l2sq", "max_abs", "nonzero", "positive")
    noise = tuple(c for c in NOISE if c not in without)
    block_table, _ = decode(blocks, blocks_where, BLOCK_STATS, (*plain, *noise))
    arrays = {c: _numbers(block_table[c]) for c in plain}
    for column, width in zip(NOISE, (SKETCH_WIDTH, SAMPLE_WIDTH), strict=True):
        is_read = column in noise
        arrays[column] = (
            _unpacked(block_table[column], width) if is_read else np.zeros((0, width), np.uint16)
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


def decode_histograms(tensors: bytes, where: str) -> dict[tuple[str, str], Histogram]:
    """The histograms of `encode_stats` by (expert's tensor, base's tensor).

    They are in the tensors' file, which is small beside that of blocks. Raises CorruptionError.
    """
    table, _ = decode(tensors, where, TENSOR_STATS, ("tensor", "base_tensor", *_HISTOGRAM))
    names = zip(table["tensor"].to_pylist(), table["base_tensor"].to_pylist(), strict=True)
    bins, counts = (_split(table[column]) for column in _HISTOGRAM)
    return dict(zip(names, zip(bins, counts, strict=True), strict=True))


def _packed(parts: Sequence[U16Array], width: int) -> pa.FixedSizeBinaryArray:
    """Rows of `width` numbers as little-endian bytes."""
    rows = np.concatenate(parts).astype("<u2")
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(2 * width), len(rows), [None, pa.py_buffer(rows.tobytes())]
    )


def _unpacked(column: pa.ChunkedArray, width: int) -> U16Array:
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
