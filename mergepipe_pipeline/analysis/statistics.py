"""Statistics of one expert against its base: per tensor and per block, in one pass over both.

Sums are taken in float64 over fixed chunks and added exactly, so tensor-level figures do not depend
on the block grid, and nothing depends on threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.analysis.stream import CHUNK_ELEMS, DeltaWindow, PairReader
from mergepipe_pipeline.digest import new_hash, sha256_hex
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.spec.stats import HIST_SHIFT, SKETCH_WIDTH, ExpertStats, TensorStats

_BINS = 1 << (32 - HIST_SHIFT - 1)
_SIGN_BIT = np.uint32(1 << 31)

S = TypeVar("S", bound=np.generic)


@dataclass(frozen=True)
class _Described:
    """What one window adds: arrays per chunk, histogram [_BINS], sketch float64 [SKETCH_WIDTH]."""

    window: DeltaWindow
    l1: npt.NDArray[np.float64]
    l2sq: npt.NDArray[np.float64]
    max_abs: npt.NDArray[np.float32]
    nonzero: npt.NDArray[np.int64]
    histogram: npt.NDArray[np.int64] | None
    sketch: npt.NDArray[np.float64] | None


def analyze_expert(
    expert: Checkpoint,
    base: Checkpoint,
    grid: BlockGrid,
    *,
    progress: Callable[[int], None] | None = None,
) -> ExpertStats:
    """One pass over the tensors that both have with equal shape and floating dtype.

    `progress` is called with expert bytes done. Raises CheckpointChangedError if a file changes
    meanwhile.
    """
    with PairReader(expert, base) as pair:
        tensors = tuple(
            _tensor_stats(pair, entry, grid, progress)
            for entry in pair.shared()
            if entry.dtype in FLOATING and base.by_name[entry.name].dtype in FLOATING
        )
        pair.verify_unchanged()
    return ExpertStats(base.checkpoint_id, expert.checkpoint_id, grid.block_elems, tensors)


def _tensor_stats(
    pair: PairReader, entry: TensorEntry, grid: BlockGrid, progress: Callable[[int], None] | None
) -> TensorStats:
    expert_hash, base_hash = new_hash(), new_hash()
    l1: list[float] = []
    chunks: list[_Described] = []
    histogram = np.zeros(_BINS, dtype=np.int64)
    sketch = np.zeros(SKETCH_WIDTH)
    for d in pair.map(entry.name, lambda w: _describe(w, entry.name)):
        expert_hash.update(d.window.expert_raw)
        base_hash.update(d.window.base_raw)
        if progress:
            progress(len(d.window.expert_raw))
        if d.histogram is not None and d.sketch is not None:
            histogram += d.histogram
            sketch += d.sketch
        l1.extend(d.l1.tolist())
        chunks.append(_without_window(d))
    l2sq = _joined([c.l2sq for c in chunks], np.float64)
    nonzero = _joined([c.nonzero for c in chunks], np.int64)
    max_abs = _joined([c.max_abs for c in chunks], np.float32)
    occupied = np.flatnonzero(histogram)
    return TensorStats(
        tensor=entry.name,
        sha256=expert_hash.hexdigest(),
        base_sha256=base_hash.hexdigest(),
        numel=entry.numel,
        l1=math.fsum(l1),
        l2sq=math.fsum(l2sq.tolist()),
        max_abs=float(max_abs.max(initial=0)),
        nonzero=int(nonzero.sum()),
        hist_bins=occupied.astype(np.uint16),
        hist_counts=histogram[occupied],
        sketch=sketch.astype(np.float32),
        block_l2sq=_per_block(l2sq, grid, np.add),
        block_nonzero=_per_block(nonzero, grid, np.add),
        block_max_abs=_per_block(max_abs, grid, np.maximum),
    )


def _describe(window: DeltaWindow, tensor: str) -> _Described:
    chunks = len(window.delta) // CHUNK_ELEMS
    if window.same:
        # Equal bytes are the usual case for frozen layers: nothing to compute, nothing to add.
        zeros = np.zeros(chunks)
        return _Described(
            window, zeros, zeros, zeros.astype(np.float32), zeros.astype(np.int64), None, None
        )
    table = window.delta.reshape(chunks, CHUNK_ELEMS)
    magnitude = np.abs(table)
    bins = magnitude.view(np.uint16).reshape(-1, 2)[: window.n, 1]
    flipped = table.view(np.uint32).reshape(-1) ^ _signs(
        tensor, window.start_elem, len(window.delta)
    )
    return _Described(
        window=window,
        l1=np.sum(magnitude, axis=1, dtype=np.float64),
        l2sq=np.einsum("ij,ij->i", table, table, dtype=np.float64),
        max_abs=magnitude.max(axis=1),
        nonzero=np.count_nonzero(table, axis=1).astype(np.int64),
        histogram=np.bincount(bins, minlength=_BINS),
        sketch=flipped.view(np.float32).reshape(-1, SKETCH_WIDTH).sum(axis=0, dtype=np.float64),
    )


def _signs(tensor: str, start_elem: int, n: int) -> npt.NDArray[np.uint32]:
    """uint32 [n]: 0 or the sign bit, a fair coin addressed by (tensor, element)."""
    key = int(sha256_hex(f"sketch:{tensor}".encode())[:32], 16)
    # One Philox counter step gives 256 bits: element e reads bit e % 256 of step e // 256.
    bits = np.random.Philox(key=key).advance(start_elem // 256).random_raw(-(-n // 64))
    unpacked = np.unpackbits(bits.view(np.uint8), bitorder="little")[:n]
    return unpacked.astype(np.uint32) * _SIGN_BIT


def _without_window(d: _Described) -> _Described:
    """The same figures without the bytes, which must not pile up."""
    empty = DeltaWindow(0, 0, bytearray(), bytearray(), np.zeros(0, np.float32), True)
    return _Described(empty, d.l1, d.l2sq, d.max_abs, d.nonzero, None, None)


def _joined(parts: list[npt.NDArray[S]], dtype: type[S]) -> npt.NDArray[S]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _per_block(chunks: npt.NDArray[S], grid: BlockGrid, combine: np.ufunc) -> npt.NDArray[S]:
    if not len(chunks):
        return chunks
    starts = np.arange(0, len(chunks), grid.block_elems // CHUNK_ELEMS)
    blocks: npt.NDArray[S] = combine.reduceat(chunks, starts)
    return blocks
