"""The tiers L0 to L3, compiled: δ in ever finer steps, each a third of the one before.

A tier's number says how δ̂ is corrected: L0 is a whole number of units (mostly none: it is for
outliers), each later one a trit. Numbers of tiers add up as integers, and are multiplied once by
the step of the last: so δ̂ has one rounding, and no order of additions.

Five trits are a byte. Byte j of a group of 64 holds elements j, j + 64, j + 128 … of the group's
320, so that loops go over neighbours, and elements of one row of a matrix stay together.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

#: Tiers there are: L0 and those of trits.
N_TIERS = 4
_PER_BYTE = 5
_GROUP_NBYTES = 64
_GROUP_ELEMS = _PER_BYTE * _GROUP_NBYTES
_MOST = np.float32(127)
_HALF, _THREE, _ZERO = np.float32(0.5), np.float32(3), np.float32(0)
#: Added and taken away again, it rounds a small float32 to the nearest integer, ties to even.
_ROUND = np.float32(12582912)
#: Five trits of zero.
NO_TRITS = np.uint8(128)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def trit_nbytes(n: int) -> int:
    """Bytes that a tier of trits takes for n elements."""
    return -(-n // _PER_BYTE)


def steps(unit: float) -> Floats:
    """The step of each tier, float32 [N_TIERS]."""
    return (unit / 3.0 ** np.arange(N_TIERS)).astype(np.float32)


@numba.njit(nogil=True, cache=True)
def quantise(
    delta: Floats,
    per_unit: np.float32,
    steps: Floats,
    units: npt.NDArray[np.int8],
    trits: Bytes,
    residual_sq: npt.NDArray[np.float64],
) -> None:
    """Encode `delta` [n]: fill `units` [n] and `trits` [N_TIERS − 1, trit_nbytes(n)].

    `per_unit` is 1 over the unit, `steps` the steps of all tiers. Adds ‖δ − δ̂‖² of each level to
    `residual_sq` [N_TIERS]. What is not finite becomes zero and makes residuals infinite.
    """
    n = len(delta)
    rest, number = np.empty(_GROUP_ELEMS, np.float32), np.empty(_GROUP_ELEMS, np.int32)
    digits = np.empty(_GROUP_ELEMS, np.uint16)
    # A lane for each element of a group: the sums have one order whatever the CPU.
    lanes = np.zeros((N_TIERS, _GROUP_ELEMS))
    n_lost = 0
    for at in range(0, n, _GROUP_ELEMS):
        part = delta[at : at + _GROUP_ELEMS]
        m, width = len(part), -(-len(part) // _PER_BYTE)
        for e in range(m):
            is_finite = part[e] - part[e] == _ZERO
            n_lost += not is_finite
            x = part[e] * per_unit if is_finite else _ZERO
            whole = (min(max(x, -_MOST), _MOST) + _ROUND) - _ROUND
            rest[e] = (x - whole) * _THREE
            number[e] = np.int32(whole)
            units[at + e] = np.int8(number[e])
        _add_residual(part, number, steps[0], lanes[0])
        for tier in range(1, N_TIERS):
            for e in range(m):
                trit = np.int32(rest[e] > _HALF) - np.int32(rest[e] < -_HALF)
                rest[e] = (rest[e] - np.float32(trit)) * _THREE
                number[e] = number[e] * np.int32(3) + trit
                digits[e] = np.uint16(trit + 1)
            digits[m:] = 1
            _add_residual(part, number, steps[tier], lanes[tier])
            _join(digits, trits[tier - 1, at // _PER_BYTE :][:width])
    for tier in range(N_TIERS):
        for lane in range(_GROUP_ELEMS):
            residual_sq[tier] += lanes[tier, lane]
        if n_lost:
            residual_sq[tier] = np.inf


@numba.njit(inline="always")
def _join(digits: Any, out: Any) -> None:
    """Fill `out` [width] with bytes of five trits, `width` apart in `digits`."""
    width = len(out)
    for j in range(width):
        code = digits[j]
        for i in range(1, _PER_BYTE):
            code = np.uint16(code * 3 + digits[i * width + j])
        # Out of 256, not of 243: then each trit is a product's upper byte.
        out[j] = np.uint8((np.uint32(code) * np.uint32(256) + 242) // np.uint32(243))


@numba.njit(inline="always")
def _add_residual(delta: Any, number: Any, step: Any, lanes: Any) -> None:
    for e in range(len(delta)):
        if delta[e] - delta[e] == _ZERO:
            difference = np.float64(delta[e]) - np.float64(np.float32(number[e]) * step)
            lanes[e] += difference * difference


@numba.njit(nogil=True, cache=True)
def approximate(
    units: Bytes, trits: tuple[Bytes, Bytes, Bytes], n_tiers: int, step: np.float32, out: Floats
) -> None:
    """Fill `out` [n] with δ̂ of the first `n_tiers` tiers, the last of them with `step`.

    `units` are the bits of int8 [n], and `trits` [trit_nbytes(n)] of each tier; an empty one is of
    zeros.
    """
    n = len(out)
    number, left = np.empty(_GROUP_ELEMS, np.int16), np.empty(_GROUP_NBYTES, np.uint16)
    for at in range(0, n, _GROUP_ELEMS):
        part = out[at : at + _GROUP_ELEMS]
        m, width = len(part), -(-len(part) // _PER_BYTE)
        if len(units):
            whole = units[at : at + m]
            for e in range(m):
                number[e] = np.int8(whole[e])
        else:
            number[:] = 0
        first = at // _PER_BYTE
        if n_tiers > 1:
            _add_trits(trits[0][first : first + width], number, left)
        if n_tiers > 2:
            _add_trits(trits[1][first : first + width], number, left)
        if n_tiers > 3:
            _add_trits(trits[2][first : first + width], number, left)
        for e in range(m):
            part[e] = np.float32(number[e]) * step


@numba.njit
def _add_trits(trits: Any, number: Any, left: Any) -> None:
    """Let `number` be three times itself and a trit more, of a group with the bytes `trits`."""
    width = len(trits)
    if not width:
        for e in range(_GROUP_ELEMS):
            number[e] = number[e] * np.int16(3)
        return
    for j in range(width):
        left[j] = trits[j]
    for i in range(_PER_BYTE):
        of = number[i * width : (i + 1) * width]
        for j in range(width):
            scaled = np.uint16(left[j] * np.uint16(3))
            of[j] = np.int16(of[j] * np.int16(3) + np.int16(scaled >> np.uint16(8)) - np.int16(1))
            left[j] = scaled & np.uint16(255)
