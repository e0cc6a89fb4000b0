"""The tiers X20 and X, compiled: the expert's own bits as integer distances to the base's.

Bits are ordered as the numbers they mean, bijectively: −0 lies below +0, and every NaN keeps its
payload. A distance wraps around, and alternates between above and below, so that small ones have
small numbers, whose upper bytes are zero.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]


def bitmap_nbytes(n: int) -> int:
    """Bytes of a bitmap of n elements."""
    return -(-n // 8)


@numba.njit(nogil=True, cache=True)
def distances(expert: Bits, base: Bits, large: npt.NDArray[np.bool_], out: Bits) -> int:
    """Fill `out` [n] with the distances of what is `large`, then those of the rest.

    Gives how many are large.
    """
    number = out.dtype.type
    top, one = number(8 * out.itemsize - 1), number(1)
    n, n_large = len(expert), 0
    for e in range(n):
        n_large += large[e]
    at, rest = 0, n_large
    for e in range(n):
        distance = number(_ordered(expert[e], number, top) - _ordered(base[e], number, top))
        folded = number(distance << one) ^ number(-number(distance >> top))
        out[at if large[e] else rest] = folded
        at += large[e]
        rest += not large[e]
    return n_large


@numba.njit(nogil=True, cache=True)
def restore(bitmap: Bytes, n_large: int, planes: Bytes, base: Bits, out: Bits) -> None:
    """Fill `out` [n] with the bits whose distances to `base` [n] `planes` [itemsize, n] hold.

    The first `n_large` are of the elements in `bitmap` (empty: of none), the rest of the others.
    Plane p has byte p of each.
    """
    number = out.dtype.type
    top, one = number(8 * out.itemsize - 1), number(1)
    n, folded = len(base), np.empty_like(out)
    for e in range(n):
        folded[e] = planes[0, e]
    for p in range(1, len(planes)):
        for e in range(n):
            folded[e] |= number(number(planes[p, e]) << number(8 * p))
    if len(bitmap):
        at, rest = 0, n_large
        for e in range(n):
            is_large = (bitmap[e >> 3] >> (e & 7)) & 1
            out[e] = folded[at if is_large else rest]
            at += is_large
            rest += 1 - is_large
    else:
        out[:] = folded
    for e in range(n):
        distance = number(out[e] >> one) ^ number(-number(out[e] & one))
        ordered = number(_ordered(base[e], number, top) + distance)
        out[e] = _ordered(ordered, number, top)


@numba.njit(inline="always")
def _ordered(bits: Any, number: Any, top: Any) -> Any:
    """All but the sign turned over in a negative number; twice is nothing."""
    sign = number(bits >> top)
    return number(bits ^ number(number(-sign) >> number(1)))
