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

#: Sums are taken in so many lanes, added in order: nothing depends on the CPU's vector length.
_LANES = 256
_SIZE, _ZERO = np.uint32(0x7FFFFFFF), np.float32(0)


def bitmap_nbytes(n: int) -> int:
    """Bytes of a bitmap of n elements."""
    return -(-n // 8)


@numba.njit(nogil=True, cache=True)
def split(
    expert: Bits,
    base: Bits,
    delta: npt.NDArray[np.float32],
    least: np.uint32,
    is_large: npt.NDArray[np.uint8],
    folded: Bits,
    out: Bits,
) -> tuple[int, float]:
    """Fill `out` [n] with the distances of large elements, then with those of the rest.

    Large are those whose bits(|δ|) are `least` or more; `is_large` [n] gets which. Gives how many
    these are, and Σδ² of the rest. `folded` [n] is room for the distances.
    """
    number = out.dtype.type
    one, most = number(1), number(number(-1) >> number(1))
    n, bits = len(out), delta.view(np.uint32)
    lanes = np.zeros(_LANES)
    for at in range(0, n, _LANES):
        part, part_bits = delta[at : at + _LANES], bits[at : at + _LANES]
        flags = is_large[at : at + _LANES]
        for i in range(len(part)):
            flags[i] = (part_bits[i] & _SIZE) >= least
            left_out = np.float64(_ZERO if flags[i] else part[i])
            lanes[i] += left_out * left_out
    for e in range(n):
        distance = number(_ordered(expert[e], number) - _ordered(base[e], number))
        is_below = number(distance > most)
        folded[e] = number(distance << one) ^ number(number(0) - is_below)
    n_large, energy = 0, 0.0
    for e in range(n):
        n_large += is_large[e]
    for lane in range(_LANES):
        energy += lanes[lane]
    # Unsigned, so that no index is looked at for being negative.
    at_large, at_rest = np.uint64(0), np.uint64(n_large)
    for e in range(n):
        flag = np.uint64(is_large[e])
        out[at_large if flag else at_rest] = folded[e]
        at_large += flag
        at_rest += np.uint64(1) - flag
    return n_large, energy


@numba.njit(nogil=True, cache=True)
def restore(
    bitmap: Bytes,
    n_large: int,
    large: tuple[Bytes, ...],
    rest: tuple[Bytes, ...],
    base: Bits,
    folded: Bits,
    out: Bits,
) -> None:
    """Fill `out` [n] with the bits that have these distances to `base` [n].

    Plane p of `large` [n_large], the elements in `bitmap` (empty: none), and of `rest`, the others,
    holds byte p of each; empty planes are of zeros. `folded` [n] is room for the distances.
    """
    n = len(base)
    _join(large, folded[:n_large])
    _join(rest, folded[n_large:])
    if len(bitmap):
        at_large, at_rest = np.uint64(0), np.uint64(n_large)
        for start in range(0, n - 7, 8):
            word = np.uint64(bitmap[start >> 3])
            for j in range(8):
                flag = (word >> np.uint64(j)) & np.uint64(1)
                out[start + j] = folded[at_large] if flag else folded[at_rest]
                at_large += flag
                at_rest += np.uint64(1) - flag
        for e in range(n - n % 8, n):
            flag = np.uint64(bitmap[e >> 3] >> (e & 7)) & np.uint64(1)
            out[e] = folded[at_large] if flag else folded[at_rest]
            at_large += flag
            at_rest += np.uint64(1) - flag
    else:
        for e in range(n):  # an assignment to all of it takes five times as long
            out[e] = folded[e]
    _add_to(base, out)


@numba.njit(nogil=True, cache=True)
def _add_to(base: Bits, out: Bits) -> None:
    """Turn distances `out` [n] to `base` [n] into bits; a loop of its own is vectorized."""
    number = out.dtype.type
    one = number(1)
    for e in range(len(base)):
        distance = number(out[e] >> one) ^ number(number(0) - number(out[e] & one))
        out[e] = _ordered(number(_ordered(base[e], number) + distance), number)


@numba.njit
def _join(planes: Any, out: Any) -> None:
    first, number = planes[0], out.dtype.type
    if not len(first):
        out[:] = 0
        return
    for e in range(len(out)):
        out[e] = first[e]
    for p in range(1, len(planes)):
        plane, shift = planes[p], number(8 * p)
        for e in range(len(out)):
            out[e] |= number(number(plane[e]) << shift)


@numba.njit(inline="always")
def _ordered(bits: Any, number: Any) -> Any:
    """All but the sign turned over in a negative number; twice is nothing.

    No shift by a number that is not known when it is compiled: loops of it are not vectorized.
    """
    most = number(number(-1) >> number(1))
    return number(bits ^ (most if bits > most else number(0)))
