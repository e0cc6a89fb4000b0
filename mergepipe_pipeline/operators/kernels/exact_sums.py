"""Sums of float32 that forget nothing: two float64 each, whatever the order of the terms."""

from __future__ import annotations

from mergepipe_pipeline.arrays import F32Array, F64Array
from mergepipe_pipeline.jit import cached_njit

#: Elements whose sums stay in the nearest cache while all rows are added.
_TILE_ELEMS = 1 << 10


@cached_njit(nogil=True)
def add_rows(
    rows: F32Array, first: int, signs: F64Array, high: F64Array, low: F64Array, beyond: F64Array
) -> None:
    """Add ±`rows` [K, first:first + n] to `high` + `low` [n]; `high` is their nearest float64.

    What the additions lose is known exactly (Knuth's two-sum) and kept in `low`; what that loses in
    turn is counted in `beyond`, which is 0 where the sum is exact, and NaN after NaN or infinity.
    """
    for start in range(0, len(high), _TILE_ELEMS):
        stop = min(len(high), start + _TILE_ELEMS)
        # All of one type and from 0 up: so it is compiled to vectors, which takes a third.
        h, rest, out = high[start:stop], low[start:stop], beyond[start:stop]
        for k in range(len(rows)):
            sign, row = signs[k], rows[k, first + start : first + stop]
            for e in range(len(h)):
                x = sign * row[e]
                total = h[e] + x
                part = total - h[e]
                lost = (h[e] - (total - part)) + (x - part)
                kept = rest[e] + lost
                part = kept - rest[e]
                out[e] += abs((rest[e] - (kept - part)) + (lost - part))
                h[e], rest[e] = total, kept
        for e in range(len(h)):
            total = h[e] + rest[e]
            part = total - h[e]
            h[e], rest[e] = total, (h[e] - (total - part)) + (rest[e] - part)
