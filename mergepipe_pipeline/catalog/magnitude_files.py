"""Magnitudes of an analysis to Parquet bytes, and those of single tensors back.

A file of its own, a row group per tensor: whoever asks for thresholds reads the tensors in
question, and nobody else any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import pyarrow as pa

from mergepipe_pipeline.catalog.row_groups import RowGroups, encode_groups
from mergepipe_pipeline.domain.stats import ExpertStats, Magnitudes

Pair = tuple[str, str]

#: A row is a block.
MAGNITUDES = pa.schema(
    [("bits", pa.list_(pa.uint32())), ("counts", pa.list_(pa.uint32()))],
)


def encode_magnitudes(stats: ExpertStats) -> bytes:
    """Bytes for `write_groups` of the magnitudes that are known; equal ones give equal bytes."""
    # Upper bytes of sorted numbers are nearly all alike: side by side they take no room. lz4 is
    # read three times as fast as zstd, which takes two thirds of the room.
    split = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in MAGNITUDES.names}
    groups = (
        ((t.tensor, t.base_tensor), _table(t.block_magnitudes))
        for t in stats.tensors
        if t.block_magnitudes and len(t.block_magnitudes.edges) > 1
    )
    return encode_groups(MAGNITUDES, groups, {}, compression="lz4", encoding=split)


def decode_magnitudes(
    file: RowGroups, pairs: Collection[Pair]
) -> Iterator[tuple[Pair, Magnitudes]]:
    """Those of `pairs` that a file of `encode_magnitudes` has, one at a time.

    Raises CorruptionError.
    """
    asked = frozenset(pairs)
    for tensor, base_tensor in file.keys:
        pair = tensor, base_tensor
        if pair in asked:
            yield pair, _magnitudes(file.read(pair))


def _table(m: Magnitudes) -> pa.Table:
    edges = pa.array(m.edges.astype(np.int32))
    columns = [pa.ListArray.from_arrays(edges, pa.array(values)) for values in (m.bits, m.counts)]
    return pa.table(columns, schema=MAGNITUDES)


def _magnitudes(table: pa.Table) -> Magnitudes:
    bits, counts = (table[c].combine_chunks() for c in MAGNITUDES.names)
    return Magnitudes(
        bits.offsets.to_numpy().astype(np.int64), bits.values.to_numpy(), counts.values.to_numpy()
    )
