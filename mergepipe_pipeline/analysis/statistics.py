"""Statistics of one expert against its base: per tensor and per block, in one pass over both.

Sums are taken in float64 over fixed chunks and added exactly, so tensor-level figures do not depend
on the block grid, and nothing depends on threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mergepipe_pipeline.analysis.stream import CHUNK_ELEMS, DeltaWindow, WindowReader
from mergepipe_pipeline.digest import new_hash, sha256_hex
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.model import Model
from mergepipe_pipeline.spec.stats import HIST_SHIFT, SKETCH_WIDTH, ExpertStats, TensorStats
from mergepipe_pipeline.spec.view import TensorView, moved

_BINS = 1 << (32 - HIST_SHIFT - 1)
#: Chunks described at once: small enough for the working memory to stay in a core's cache.
_PIECE_CHUNKS = 64
#: uint32 [256, 8]: the eight bits of a byte, lowest first, as float32 sign bits.
_SIGNS_OF_BYTE = np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
).astype(np.uint32) << np.uint32(31)

S = TypeVar("S", bound=np.generic)


@dataclass(frozen=True)
class _Figures:
    """What one window adds: arrays per chunk, histogram [_BINS], sketch float64 [SKETCH_WIDTH]."""

    l1: npt.NDArray[np.float64]
    l2sq: npt.NDArray[np.float64]
    max_abs: npt.NDArray[np.float32]
    nonzero: npt.NDArray[np.int64]
    histogram: npt.NDArray[np.int64]
    sketch: npt.NDArray[np.float64]


class _Scratch(threading.local):
    """One thread's working memory for a piece, kept between windows."""

    def __init__(self) -> None:
        shape = (_PIECE_CHUNKS, CHUNK_ELEMS)
        self.magnitude = np.empty(shape, dtype=np.float32)
        self.bins = np.empty(shape, dtype=np.int32)
        self.flipped = np.empty(shape, dtype=np.uint32)
        self.wide = np.empty(shape, dtype=np.float64)
        self.square = np.empty(shape, dtype=np.float64)
        self.differs = np.empty(shape, dtype=np.bool_)


_scratch = _Scratch()


def analyze_expert(
    expert: Model,
    base: Model,
    pairs: Sequence[tuple[str, str]],
    grid: BlockGrid,
    *,
    progress: Callable[[int], None] | None = None,
) -> ExpertStats:
    """One pass over pairs of (expert's tensor, base's tensor), which have equal shapes.

    `progress` is called with bytes done. Raises CheckpointChangedError if a file changes meanwhile.
    """
    offset = len(expert.checkpoints)
    with WindowReader((*expert.checkpoints, *base.checkpoints)) as reader:
        tensors = tuple(
            _tensor_stats(
                reader, expert.views[mine], moved(base.views[theirs], offset), grid, progress
            )
            for mine, theirs in pairs
        )
        reader.verify_unchanged()
    return ExpertStats(base.model_id, expert.model_id, grid.block_elems, tensors)


def _tensor_stats(
    reader: WindowReader,
    expert: TensorView,
    base: TensorView,
    grid: BlockGrid,
    progress: Callable[[int], None] | None,
) -> TensorStats:
    expert_hash, base_hash = new_hash(), new_hash()
    figures: list[_Figures] = []
    histogram = np.zeros(_BINS, dtype=np.int64)
    sketch = np.zeros(SKETCH_WIDTH)
    # A sketch belongs to the elements of the base, so that experts can be compared.
    for window, found in reader.deltas(expert, base, lambda w: (w, _describe(w, base.name))):
        expert_hash.update(window.expert_raw)
        base_hash.update(window.base_raw)
        if progress:
            progress(len(window.expert_raw))
        with np.errstate(invalid="ignore"):  # inf − inf of a damaged expert is NaN, not a warning
            histogram += found.histogram
            sketch += found.sketch
        # The window sums stay in `histogram` and `sketch`; only figures per chunk may pile up.
        figures.append(replace(found, histogram=histogram, sketch=sketch))
    hashed = expert.stands_alone and not (expert.low_rank or base.low_rank)
    whole = hashed and expert.numel == base.numel
    l1 = _joined([f.l1 for f in figures], np.float64)
    l2sq = _joined([f.l2sq for f in figures], np.float64)
    nonzero = _joined([f.nonzero for f in figures], np.int64)
    max_abs = _joined([f.max_abs for f in figures], np.float32)
    occupied = np.flatnonzero(histogram)
    return TensorStats(
        tensor=expert.name,
        base_tensor=base.name,
        sha256=expert_hash.hexdigest() if hashed and not expert.runs else "",
        base_sha256=base_hash.hexdigest() if whole and not base.runs else "",
        numel=expert.numel,
        l1=math.fsum(l1.tolist()),
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


def _describe(window: DeltaWindow, tensor: str) -> _Figures:
    chunks = len(window.delta) // CHUNK_ELEMS
    figures = _Figures(
        l1=np.zeros(chunks),
        l2sq=np.zeros(chunks),
        max_abs=np.zeros(chunks, dtype=np.float32),
        nonzero=np.zeros(chunks, dtype=np.int64),
        histogram=np.zeros(_BINS, dtype=np.int64),
        sketch=np.zeros(SKETCH_WIDTH),
    )
    if window.same:
        # Equal bytes are the usual case for frozen layers: nothing to compute.
        figures.histogram[0] = window.n
        return figures
    table = window.delta.reshape(chunks, CHUNK_ELEMS)
    for start in range(0, chunks, _PIECE_CHUNKS):
        stop = min(chunks, start + _PIECE_CHUNKS)
        start_elem = window.start_elem + start * CHUNK_ELEMS
        with np.errstate(invalid="ignore"):
            _add_piece(figures, table[start:stop], slice(start, stop), tensor, start_elem)
    figures.histogram[0] -= len(window.delta) - window.n  # the padding
    return figures


def _add_piece(
    figures: _Figures, delta: npt.NDArray[np.float32], rows: slice, tensor: str, start_elem: int
) -> None:
    """Fill in `rows` of `figures` from `delta` [m, CHUNK_ELEMS]; add to histogram and sketch."""
    s, m = _scratch, len(delta)
    magnitude = np.abs(delta, out=s.magnitude[:m])
    figures.max_abs[rows] = magnitude.max(axis=1)
    differs = np.not_equal(delta, 0, out=s.differs[:m])
    figures.nonzero[rows] = [np.count_nonzero(row) for row in differs]
    wide = s.wide[:m]
    np.copyto(wide, magnitude)
    figures.l1[rows] = wide.sum(axis=1)
    figures.l2sq[rows] = np.square(wide, out=s.square[:m]).sum(axis=1)
    # torch counts without widening to 64 bits first, and without holding the interpreter's lock.
    bins = torch.from_numpy(s.bins[:m].reshape(-1))
    np.right_shift(magnitude.view(np.int32), HIST_SHIFT, out=s.bins[:m])
    figures.histogram[:] += torch.bincount(bins, minlength=_BINS).numpy()
    signs = _signs(tensor, start_elem, delta.size).reshape(m, -1)
    flipped = np.bitwise_xor(delta.view(np.uint32), signs, out=s.flipped[:m])
    rounds = flipped.view(np.float32).reshape(-1, SKETCH_WIDTH)
    figures.sketch[:] += rounds.sum(axis=0, dtype=np.float64)


def _signs(tensor: str, start_elem: int, n: int) -> npt.NDArray[np.uint32]:
    """uint32 [n]: 0 or the sign bit, a fair coin addressed by (tensor, element).

    `start_elem` and `n` are multiples of SKETCH_WIDTH: a Philox counter step gives 256 bits, and
    element e reads bit e % 256 of step e // 256.
    """
    key = int(sha256_hex(f"sketch:{tensor}".encode())[:32], 16)
    bits = np.random.Philox(key=key).advance(start_elem // 256).random_raw(n // 64)
    return _SIGNS_OF_BYTE.take(bits.astype("<u8", copy=False).view(np.uint8), axis=0).reshape(-1)


def _joined(parts: list[npt.NDArray[S]], dtype: type[S]) -> npt.NDArray[S]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _per_block(chunks: npt.NDArray[S], grid: BlockGrid, combine: np.ufunc) -> npt.NDArray[S]:
    if not len(chunks):
        return chunks
    starts = np.arange(0, len(chunks), grid.block_elems // CHUNK_ELEMS)
    blocks: npt.NDArray[S] = combine.reduceat(chunks, starts)
    return blocks
