"""Sums of float32 that forget nothing: two float64 each, whatever the order of the terms."""

from __future__ import annotations

from mergepipe_pipeline.arrays import BoolArray, F32Array, F64Array
from mergepipe_pipeline.jit import cached_njit

#: Elements whose sums stay in the nearest cache while all rows are added.
_TILE_ELEMS = 1 << 10


@cached_njit(nogil=True)
def add_rows(
    rows: F32Array, signs: F64Array, high: F64Array, low: F64Array, exact: BoolArray
) -> None:
    """Add ±`rows` [K, n] to `high` + `low` [n], and make `high` that sum's nearest float64.

    What the additions lose is known exactly (Knuth's two-sum) and kept in `low`; where that has no
    room for it, or a term is NaN or infinite, `exact` becomes false and the sum means nothing.
    """
    for start in range(0, len(high), _TILE_ELEMS):
        stop = min(len(high), start + _TILE_ELEMS)
        for k in range(len(rows)):
            for e in range(start, stop):
                x, h, rest = signs[k] * rows[k, e], high[e], low[e]
                total = h + x
                part = total - h
                lost = (h - (total - part)) + (x - part)
                kept = rest + lost
                part = kept - rest
                exact[e] &= (rest - (kept - part)) + (lost - part) == 0
                high[e], low[e] = total, kept
        for e in range(start, stop):
            h, rest = high[e], low[e]
            total = h + rest
            part = total - h
            high[e], low[e] = total, (h - (total - part)) + (rest - part)
