"""Statistics to Parquet bytes and back: a row is a tensor of an expert against one of the base."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mergepipe_pipeline.arrays import U16Array
from mergepipe_pipeline.catalog.arrow_tables import Key, encode_groups
from mergepipe_pipeline.domain.stats import (
    SAMPLE_WIDTH,
    ExpertStats,
    Histogram,
    Magnitudes,
    TensorStats,
)

_SCALARS = {
    "tensor": pa.string(),
    "base_tensor": pa.string(),
    "digest": pa.string(),
    "base_digest": pa.string(),
    "dtype": pa.string(),
    "base_dtype": pa.string(),
    "numel": pa.int64(),
    "l1": pa.float64(),
    "l2sq": pa.float64(),
    "max_abs": pa.float64(),
    "nonzero": pa.int64(),
}
_ARRAYS = {
    "hist_bins": pa.uint16(),
    "hist_counts": pa.int64(),
    "block_l2sq": pa.float64(),
    "block_max_abs": pa.float32(),
    "block_nonzero": pa.int64(),
}
#: Rows of so many numbers of 16 bits: in Parquet, these would take 32.
_ROWS = {"block_sample": SAMPLE_WIDTH}
#: What `without` names, as columns.
_COLUMNS = {"sample": ("block_sample",), "hist": ("hist_bins", "hist_counts")}
#: Null where they are not known; entries per block, and all of the tensor's.
MAGNITUDES = {"entries": pa.uint32(), "bits": pa.uint32(), "counts": pa.uint32()}

PAIR_STATS = pa.schema(
    [
        *_SCALARS.items(),
        *((name, pa.list_(type_)) for name, type_ in _ARRAYS.items()),
        *((name, pa.list_(pa.binary(2 * width))) for name, width in _ROWS.items()),
        *((name, pa.list_(type_)) for name, type_ in MAGNITUDES.items()),
    ]
)
#: Of an expert's facts in a row group.
_GROUP_NBYTES = 1 << 22


def encode_stats(stats: ExpertStats) -> bytes:
    """Parquet bytes of statistics: what is read alone lies together."""
    paths = {f.name: f.name + (".list.element" if f.type.num_fields else "") for f in PAIR_STATS}
    # Samples are noise, which compression only makes slower to read. Of sorted numbers
    # the upper bytes are nearly all alike: side by side they take no room. lz4 is read three times
    # as fast as zstd, which takes two thirds of the room.
    kinds = dict.fromkeys(_ROWS, "none") | dict.fromkeys(MAGNITUDES, "lz4")
    return encode_groups(
        PAIR_STATS,
        _groups(stats.tensors),
        {"block_elems": stats.block_elems},
        compression={path: kinds.get(name, "zstd") for name, path in paths.items()},
        encoding={paths[name]: "BYTE_STREAM_SPLIT" for name in ("bits", "counts")},
    )


def _groups(tensors: Sequence[TensorStats]) -> Iterator[tuple[Key, pa.Table]]:
    some: list[TensorStats] = []
    nbytes = 0
    for number, t in enumerate(tensors, 1):
        some.append(t)
        m = t.block_magnitudes
        nbytes += t.block_sample.nbytes + (m.bits.nbytes * 2 if m else 0)
        if nbytes >= _GROUP_NBYTES or number == len(tensors):
            yield tuple((t.tensor, t.base_tensor) for t in some), _table(some)
            some, nbytes = [], 0


def _table(tensors: Sequence[TensorStats]) -> pa.Table:
    columns = {c: pa.array([getattr(t, c) for t in tensors], _SCALARS[c]) for c in _SCALARS}
    columns |= {c: _lists([getattr(t, c) for t in tensors], pa.array) for c in _ARRAYS}
    columns |= {c: _lists([getattr(t, c) for t in tensors], _packed) for c in _ROWS}
    magnitudes = [t.block_magnitudes for t in tensors]
    entries = [None if m is None else np.diff(m.edges).astype(np.uint32) for m in magnitudes]
    columns["entries"] = _lists(entries, pa.array)
    for name in ("bits", "counts"):
        columns[name] = _lists([None if m is None else getattr(m, name) for m in magnitudes])
    return pa.table(columns, schema=PAIR_STATS)


def _lists(parts: Sequence[npt.NDArray[Any] | None], to_arrow: Any = pa.array) -> pa.ListArray:
    """A list per part; null for none."""
    known = [p for p in parts if p is not None]
    ends = np.cumsum([0, *(0 if p is None else len(p) for p in parts)]).astype(np.int32)
    values = np.concatenate(known) if known else np.zeros(0, np.uint32)
    mask = pa.array([p is None for p in parts]) if len(known) < len(parts) else None
    return pa.ListArray.from_arrays(pa.array(ends), to_arrow(values), mask=mask)


def _packed(rows: U16Array) -> pa.FixedSizeBinaryArray:
    """Rows of numbers as little-endian bytes."""
    data = [None, pa.py_buffer(rows.astype("<u2").tobytes())]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(2 * rows.shape[1]), len(rows), data)


def columns_without(without: Collection[str] = ()) -> list[str]:
    """The columns to read of statistics without some ("sample", "hist")."""
    left = {column for name in without for column in _COLUMNS[name]} | MAGNITUDES.keys()
    return [name for name in PAIR_STATS.names if name not in left]


def decode_stats(table: pa.Table) -> list[TensorStats]:
    """The statistics of rows of `PAIR_STATS`, empty where a column was not read."""
    empty: dict[str, Any] = {c: np.zeros(0, _ARRAYS[c].to_pandas_dtype()) for c in _ARRAYS}
    empty |= {c: np.zeros((0, width), np.uint16) for c, width in _ROWS.items()}
    there = set(table.column_names)
    arrays: dict[str, list[Any]] = {
        c: _split(table, c) if c in there else [none] * len(table) for c, none in empty.items()
    }
    return [
        TensorStats(**row, **{c: of_rows[number] for c, of_rows in arrays.items()})
        for number, row in enumerate(table.select(list(_SCALARS)).to_pylist())
    ]


def decode_histograms(table: pa.Table) -> dict[tuple[str, str], Histogram]:
    """The histograms of rows, by (expert's tensor, base's tensor)."""
    histograms = zip(*(_split(table, column) for column in _COLUMNS["hist"]), strict=True)
    return dict(zip(_pairs(table), histograms, strict=True))


def decode_magnitudes(table: pa.Table) -> Iterator[tuple[tuple[str, str], Magnitudes]]:
    """The magnitudes of rows that have some, by (expert's tensor, base's tensor)."""
    known = table["bits"].is_valid().to_pylist()
    arrays = zip(*(_split(table, column) for column in MAGNITUDES), strict=True)
    for pair, is_known, (entries, bits, counts) in zip(_pairs(table), known, arrays, strict=True):
        if is_known and len(entries):
            edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(entries, dtype=np.int64)])
            yield pair, Magnitudes(edges, bits, counts)


def _pairs(table: pa.Table) -> list[tuple[str, str]]:
    names = (table[column].to_pylist() for column in ("tensor", "base_tensor"))
    return list(zip(*names, strict=True))


def _split(table: pa.Table, column: str) -> list[npt.NDArray[Any]]:
    """The lists of a column as arrays; empty for null."""
    lists = table[column].combine_chunks()
    if isinstance(lists, pa.ChunkedArray):  # of no chunk, or of more than one can hold
        return [part for chunk in lists.chunks for part in _split_chunk(chunk, column)]
    return _split_chunk(lists, column)


def _split_chunk(lists: pa.ListArray, column: str) -> list[npt.NDArray[Any]]:
    edges = np.from_dlpack(lists.offsets)
    if column not in _ROWS:
        values = np.from_dlpack(lists.values)
    else:
        numbers = np.frombuffer(lists.values.buffers()[1] or b"", "<u2")
        values = numbers.reshape(-1, _ROWS[column])[lists.values.offset :]
    return [values[a:b] for a, b in pairwise(edges)]
