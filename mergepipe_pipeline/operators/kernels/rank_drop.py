"""Drops elements of rows by the rank of their magnitude, without comparing any two: compiled.

Ranks come from counting digits of a magnitude's bits, the lowest first. Of a difference of two
bfloat16 numbers the low half is zero almost always, and digits that are all equal are passed over.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F32Array, I64Array, U32Array
from mergepipe_pipeline.jit import cached_njit

_DIGITS, _VALUES = 4, 256
_SIZE = np.uint32(0x7FFFFFFF)


@cached_njit(nogil=True)
def drop_rows(
    rows: F32Array, numbers: U32Array, limits: npt.NDArray[np.uint64], factors: F32Array
) -> None:
    """Multiply what is kept of `rows`, float32 [r, n], by its factor and the rest by 0; in place.

    `limits` and `factors` [n] are by rank of |δ| in its row, rising, equal ones in order of their
    index; an element is kept iff its number in `numbers`, uint32 [r·n], is below its limit.
    """
    count, n = rows.shape
    order, scratch = np.empty(n, np.uint32), np.empty(n, np.uint32)
    sizes, tallies = np.empty(n, np.uint32), np.empty((_DIGITS, _VALUES), np.int64)
    for r in range(count):
        row, drawn = rows[r], numbers[r * n : (r + 1) * n]
        bits = row.view(np.uint32)
        for i in range(n):
            sizes[i] = bits[i] & _SIZE
        ranked = _ascending(sizes, order, scratch, tallies)
        for k in range(n):
            i = ranked[k]
            row[i] *= factors[k] if drawn[i] < limits[k] else np.float32(0)


@cached_njit(nogil=True)
def _ascending(sizes: U32Array, order: U32Array, scratch: U32Array, tallies: I64Array) -> U32Array:
    """Places of `sizes` in rising order, equal ones in order of place; in `order` or `scratch`."""
    n = len(sizes)
    # How often each of 256 values occurs in each of the four bytes, [_DIGITS, _VALUES].
    tallies[:] = 0
    for i in range(n):
        order[i] = i
        for digit in range(_DIGITS):
            tallies[digit, (sizes[i] >> np.uint32(8 * digit)) & np.uint32(255)] += 1
    for digit in range(_DIGITS):
        tally, shift = tallies[digit], np.uint32(8 * digit)
        if n and tally[(sizes[0] >> shift) & np.uint32(255)] == n:
            continue  # all have this byte in common
        # From counts to where each value's elements begin, then every element to its place. Equal
        # bytes keep their order, so that what earlier bytes sorted stays sorted.
        start = 0
        for value in range(_VALUES):
            tally[value], start = start, start + tally[value]
        for k in range(n):
            i = order[k]
            value = (sizes[i] >> shift) & np.uint32(255)
            scratch[tally[value]] = i
            tally[value] += 1
        order, scratch = scratch, order
    return order
