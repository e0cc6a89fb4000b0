"""Magnitudes of an analysis to Parquet bytes, and those of single tensors back.

A file of its own, a row group per tensor: whoever asks for thresholds reads the tensors in
question, and nobody else any.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mergepipe_pipeline.catalog.tables import FACTS_KEY, corruption_named, meta_of
from mergepipe_pipeline.spec.stats import ExpertStats, Magnitudes

Pair = tuple[str, str]

#: A row is a block.
MAGNITUDES = pa.schema(
    [("bits", pa.list_(pa.uint32())), ("counts", pa.list_(pa.uint32()))],
)


def encode_magnitudes(stats: ExpertStats) -> bytes:
    """Parquet bytes of the magnitudes that are known; equal ones give equal bytes."""
    known = [t for t in stats.tensors if t.block_magnitudes and len(t.block_magnitudes.edges) > 1]
    pairs = [(t.tensor, t.base_tensor) for t in known]
    packed = json.dumps({"tensors": pairs}, sort_keys=True).encode()
    schema = MAGNITUDES.with_metadata({FACTS_KEY: packed})
    sink = io.BytesIO()
    # Upper bytes of sorted numbers are nearly all alike: side by side they take no room. lz4 is
    # read three times as fast as zstd, which takes two thirds of the room.
    split = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in MAGNITUDES.names}
    with pq.ParquetWriter(
        sink, schema, compression="lz4", use_dictionary=False, column_encoding=split
    ) as writer:
        for t in known:
            assert t.block_magnitudes is not None
            edges = pa.array(t.block_magnitudes.edges.astype(np.int32))
            columns = [
                pa.ListArray.from_arrays(edges, pa.array(values))
                for values in (t.block_magnitudes.bits, t.block_magnitudes.counts)
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=len(edges))
    return sink.getvalue()


def decode_magnitudes(
    file: BinaryIO, where: str, pairs: Collection[Pair]
) -> Iterator[tuple[Pair, Magnitudes]]:
    """Those of `pairs` that an open file of `encode_magnitudes` has, one at a time.

    Raises CorruptionError naming `where`.
    """
    with corruption_named(where):
        parquet = pq.ParquetFile(file)
        groups = [(a, b) for a, b in meta_of(parquet, MAGNITUDES)["tensors"]]
    wanted = frozenset(pairs)
    for number, pair in enumerate(groups):
        if pair in wanted:
            with corruption_named(where):
                found = _magnitudes(parquet.read_row_group(number, use_threads=False))
            yield pair, found


def _magnitudes(table: pa.Table) -> Magnitudes:
    bits, counts = (table[c].combine_chunks() for c in MAGNITUDES.names)
    return Magnitudes(
        bits.offsets.to_numpy().astype(np.int64), bits.values.to_numpy(), counts.values.to_numpy()
    )
