"""The arithmetic of analysis: one fused pass over a window, compiled.

NumPy would read the window once for each figure. For bfloat16, the usual case, δ is made inside the
pass and never written to memory. Sums are taken in float64 in lanes of 256 elements, added in
order: nothing depends on the CPU's vector length.
"""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.analysis.magnitudes import BINS, Room, end_block
from mergepipe_pipeline.arrays import F32Array, F64Array, I32Array, I64Array, U16Array, U32Array
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.stats import HIST_SHIFT, SAMPLE_WIDTH
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.operators.kernels.kept_l1 import CHUNK_ELEMS, LANES, subtract
from mergepipe_pipeline.operators.kernels.splitmix import GAMMA
from mergepipe_pipeline.operators.kernels.uniforms import mixed

_SHIFT, _LOW = np.uint32(HIST_SHIFT), np.uint32((1 << HIST_SHIFT) - 1)
_SIZE = np.uint32(0x7FFFFFFF)
#: Of two float32 in 64 bits: where the bin of each begins, and their lower bits.
_HALF, _BIN = np.uint64(32), np.uint64(BINS - 1)
_SHIFT_OF_FIRST, _SHIFT_OF_SECOND = np.uint64(HIST_SHIFT), np.uint64(HIST_SHIFT + 32)
_LOW_OF_BOTH = np.uint64(((1 << HIST_SHIFT) - 1) * ((1 << 32) + 1))
_BF16_INFINITY = 0x7F80

Sums = F64Array
Peaks = F32Array
Counts = I64Array


@cached_njit(nogil=True)
def describe(
    delta: F32Array,
    sums: Sums,
    peaks: Peaks,
    counts: Counts,
    histogram: Counts,
    block_elems: int,
    room: Room,
) -> None:
    """Describe `delta`, float32 [chunks · CHUNK_ELEMS], chunk by chunk.

    Fills `sums` [chunks, 2] (Σ|δ|, Σδ²), `peaks` [chunks] (max |δ|) and `counts` [chunks]
    (δ ≠ 0); adds to `histogram` [bins] of bits(|δ|) >> HIST_SHIFT. `room` takes the magnitudes of
    blocks of `block_elems`.
    """
    even, odd = np.zeros(BINS, np.int32), np.zeros(BINS, np.int32)
    per_block, n_aside = block_elems // CHUNK_ELEMS, 0
    for chunk in range(len(peaks)):
        part = delta[chunk * CHUNK_ELEMS : (chunk + 1) * CHUNK_ELEMS]
        _describe_chunk(part, chunk, sums, peaks, counts)
        n_aside = _count_chunk(part, even, odd, n_aside, room.aside[0])
        if (chunk + 1) % per_block == 0 or chunk + 1 == len(peaks):
            block = chunk // per_block
            top = _top_bin(peaks[block * per_block : chunk + 1])
            end_block(block, n_aside, even, odd, top, histogram, room)
            n_aside = 0


@cached_njit(nogil=True)
def describe_bfloat16(
    expert: U16Array,
    base: U16Array,
    sums: Sums,
    peaks: Peaks,
    counts: Counts,
    histogram: Counts,
    block_elems: int,
    room: Room,
) -> None:
    """Describe δ = expert − base of n bfloat16 elements given by their bits, uint16 [n].

    The last chunk counts as filled up with zeros. Chunks of equal finite bits cost a comparison.
    """
    even, odd = np.zeros(BINS, np.int32), np.zeros(BINS, np.int32)
    per_block, n_aside = block_elems // CHUNK_ELEMS, 0
    delta = np.zeros(CHUNK_ELEMS, np.float32)
    n = len(expert)
    for chunk in range(len(peaks)):
        start = chunk * CHUNK_ELEMS
        here = min(CHUNK_ELEMS, n - start)
        if _is_equal(expert[start : start + here], base[start : start + here]):
            histogram[0] += CHUNK_ELEMS
        else:
            subtract(expert[start : start + here], base[start : start + here], delta)
            _describe_chunk(delta, chunk, sums, peaks, counts)
            n_aside = _count_chunk(delta, even, odd, n_aside, room.aside[0])
        if (chunk + 1) % per_block == 0 or chunk + 1 == len(peaks):
            block = chunk // per_block
            top = _top_bin(peaks[block * per_block : chunk + 1])
            end_block(block, n_aside, even, odd, top, histogram, room)
            n_aside = 0


@cached_njit(nogil=True)
def _is_equal(expert: U16Array, base: U16Array) -> bool:
    """Whether equal bits mean a difference of zero: ∞ − ∞ is none."""
    for i in range(len(expert)):
        if expert[i] != base[i]:
            return False
    largest = np.uint16(0)
    for i in range(len(expert)):
        largest = max(largest, expert[i] & np.uint16(0x7FFF))
    return bool(largest < _BF16_INFINITY)


@cached_njit(nogil=True)
def _describe_chunk(delta: F32Array, chunk: int, sums: Sums, peaks: Peaks, counts: Counts) -> None:
    l1, l2 = np.zeros(LANES), np.zeros(LANES)  # lane l adds up elements l, l + LANES, …
    # Four at a time: to load and store the lanes takes as long as to add.
    for at in range(0, CHUNK_ELEMS, 4 * LANES):
        for lane in range(LANES):
            i = at + lane
            a, b = np.float64(delta[i]), np.float64(delta[i + LANES])
            c, d = np.float64(delta[i + 2 * LANES]), np.float64(delta[i + 3 * LANES])
            l1[lane] = l1[lane] + abs(a) + abs(b) + abs(c) + abs(d)
            l2[lane] = l2[lane] + a * a + b * b + c * c + d * d
    total, square = 0.0, 0.0
    for lane in range(LANES):
        total += l1[lane]
        square += l2[lane]
    sums[chunk, 0], sums[chunk, 1] = total, square
    counts[chunk] = _nonzero(delta)
    peaks.view(np.uint32)[chunk] = _largest_size(delta)
    if np.isnan(square):  # one NaN for all kinds
        peaks[chunk] = np.nan


@cached_njit(nogil=True)
def _largest_size(delta: F32Array) -> np.uint32:
    """The largest pattern of |δ|: as integers they have a vector instruction, as floats none."""
    bits, largest = delta.view(np.uint32), np.zeros(LANES, np.uint32)
    for at in range(0, CHUNK_ELEMS, LANES):
        for lane in range(LANES):
            size = bits[at + lane] & _SIZE
            largest[lane] = size if size > largest[lane] else largest[lane]
    most = np.uint32(0)
    for lane in range(LANES):
        most = max(most, largest[lane])
    return most


@cached_njit(nogil=True)
def _nonzero(delta: F32Array) -> int:
    """How many δ ≠ 0."""
    nonzero = np.uint32(0)
    for i in range(CHUNK_ELEMS):
        nonzero = np.uint32(nonzero + np.uint32(delta[i] != 0))
    return int(nonzero)


@cached_njit(nogil=True)
def _count_chunk(
    delta: F32Array, even: I32Array, odd: I32Array, n_aside: int, aside: U32Array
) -> int:
    """Count magnitudes by their upper bits; those with lower bits are also set aside.

    Gives how many lie in `aside`, whose last place takes those that have no room.
    """
    last, pairs = len(aside) - 2, delta.view(np.uint64)
    # Two tables: neighbours are often equal, and a counter cannot be raised twice at once.
    for i in range(len(pairs)):
        pair = pairs[i]
        even[(pair >> _SHIFT_OF_FIRST) & _BIN] += 1
        odd[(pair >> _SHIFT_OF_SECOND) & _BIN] += 1
        if pair & _LOW_OF_BOTH and n_aside < last:
            first, second = np.uint32(pair) & _SIZE, np.uint32(pair >> _HALF) & _SIZE
            aside[n_aside] = first
            n_aside += (first & _LOW) != 0
            aside[n_aside] = second
            n_aside = min(n_aside + ((second & _LOW) != 0), last)
    return n_aside


@cached_njit(nogil=True)
def _top_bin(peaks: Peaks) -> int:
    """The largest bin that may be occupied."""
    top = 0
    for i in range(len(peaks)):
        top = max(top, (peaks.view(np.int32)[i] & 0x7FFFFFFF) >> HIST_SHIFT)
    return top if top < _BF16_INFINITY else BINS - 1


def sample_elems(key: np.uint64, grid: BlockGrid, start_elem: int, stop_elem: int) -> I64Array:
    """Which elements of the blocks in [start_elem, stop_elem) are kept: int64 [blocks, 64].

    A block is cut into SAMPLE_WIDTH equal parts, and one element drawn from each; so a part shorter
    than an element repeats one. `key` is the tensor's.
    """
    starts = np.arange(start_elem, stop_elem, grid.block_elems)[:, None]
    lengths = np.minimum(grid.block_elems, stop_elem - starts)
    parts = np.arange(SAMPLE_WIDTH)
    numbers = ((starts // grid.block_elems) * SAMPLE_WIDTH + parts).astype(np.uint64)
    with np.errstate(over="ignore"):
        draws = mixed.py_func(~key + numbers * GAMMA) >> np.uint64(40)
    elems: I64Array = starts + ((parts + draws * 2.0**-24) * lengths / SAMPLE_WIDTH).astype(
        np.int64
    )
    return elems
