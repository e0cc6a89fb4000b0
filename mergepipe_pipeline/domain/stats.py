"""Statistics of an expert's delta, per tensor and per block, as plain arrays.

Filled in by `analysis`, kept by `catalog`, read by `planner`. Statistics of δ = float32(expert) −
float32(base), elementwise; sums in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mergepipe_pipeline.arrays import F32Array, F64Array, I64Array, U16Array, U32Array
from mergepipe_pipeline.bfloat16 import NAN_BITS, nearest
from mergepipe_pipeline.domain.segments import Segments

#: Elements of every block whose deltas are kept, the same for all experts of a base's tensor.
SAMPLE_WIDTH = 64
#: A magnitude's histogram bin is its float32 pattern without sign, shifted by this many bits.
HIST_SHIFT = 16


#: Bins and their counts, as `TensorStats` has them.
Histogram = tuple[U16Array, I64Array]


@dataclass(frozen=True)
class Kept:
    """`block_sq_norm` [blocks]: the expected part of Σδ² that is kept; `most`: an upper limit."""

    block_sq_norm: F64Array
    most: float


@dataclass(frozen=True)
class Magnitudes:
    """Every |δ| > 0 that occurs in a tensor, counted block by block.

    Block k has the entries `edges[k]` to `edges[k + 1]` of `bits` (uint32, patterns of float32,
    ascending) and `counts` (uint32); `edges` is int64 [blocks + 1].
    """

    edges: I64Array
    bits: U32Array
    counts: U32Array

    @staticmethod
    def joined(parts: Sequence[Magnitudes]) -> Magnitudes:
        """Of a tensor, from those of runs of its blocks in order."""
        sizes = np.concatenate([np.zeros(1, np.int64), *(np.diff(p.edges) for p in parts)])
        bits = [np.zeros(0, np.uint32), *(p.bits for p in parts)]
        counts = [np.zeros(0, np.uint32), *(p.counts for p in parts)]
        return Magnitudes(np.cumsum(sizes), np.concatenate(bits), np.concatenate(counts))


@dataclass(frozen=True)
class TensorStats:
    """One expert tensor against a tensor of the base.

    `digest` and `base_digest` are of the stored bytes, empty where the pass did not see them whole;
    with `dtype` and `base_dtype` (safetensors codes) they say what was compared.

    `hist_bins` (uint16, ascending) and `hist_counts` (int64): occupied bins of bits(|δ|) >> 16.
    `block_*`: one entry per block of the grid. `block_sample`: [blocks, SAMPLE_WIDTH],
    δ at elements that are spread evenly and equal for all experts, so that whatever works element
    by element can be tried on them: bfloat16 as uint16; see `widened`.

    `block_magnitudes` are known of what analysis just found, where nearly all |δ| are bfloat16
    numbers; the catalog gives them only to who asks. `segments` and `base_segments`, likewise, are
    of the bytes that the digests are of, one per level of `segments.levels_for`.
    """

    tensor: str
    base_tensor: str
    digest: str
    base_digest: str
    dtype: str
    base_dtype: str
    numel: int
    l1: float
    l2sq: float
    max_abs: float
    nonzero: int
    hist_bins: U16Array
    hist_counts: I64Array
    block_l2sq: F64Array
    block_max_abs: F32Array
    block_nonzero: I64Array
    block_sample: U16Array
    block_magnitudes: Magnitudes | None = None
    segments: tuple[Segments, ...] = field(default=(), compare=False)
    base_segments: tuple[Segments, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class ExpertStats:
    """Tensors of one expert against a base's, on one block grid; ids are those of models."""

    base_id: str
    checkpoint_id: str
    block_elems: int
    tensors: tuple[TensorStats, ...]

    @cached_property
    def by_pair(self) -> dict[tuple[str, str], TensorStats]:
        """By (expert's tensor, base's tensor)."""
        return {(t.tensor, t.base_tensor): t for t in self.tensors}


def narrowed(values: F32Array) -> U16Array:
    """Float32 to the bits of the nearest bfloat16, ties to even; what is not a number stays so."""
    rounded = nearest(values.view(np.uint32))
    return np.where(np.isnan(values), NAN_BITS, rounded.astype(np.uint16))


def widened(bits: U16Array) -> F32Array:
    """The float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
