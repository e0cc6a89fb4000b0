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


def step_of(unit: float, tier: int) -> np.float32:
    """The step of a tier, counted from L0."""
    return np.float32(unit / 3.0**tier)


def steps(unit: float) -> Floats:
    """The steps of all tiers, float32 [N_TIERS]."""
    return np.array([step_of(unit, tier) for tier in range(N_TIERS)])


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
    room = (
        np.empty(_GROUP_ELEMS, np.float32),
        np.empty(_GROUP_ELEMS, np.int32),
        np.empty(_GROUP_ELEMS, np.uint16),
    )
    # A lane for each element of a group: the sums have one order whatever the CPU.
    lanes = np.zeros((N_TIERS, _GROUP_ELEMS))
    left, n_lost = len(delta) % _GROUP_ELEMS, 0
    for at in range(0, len(delta) - left, _GROUP_ELEMS):
        # Loops whose lengths are known have no ends to look after: they take half as long.
        part, whole = delta[at : at + _GROUP_ELEMS], units[at : at + _GROUP_ELEMS]
        codes = trits[:, at // _PER_BYTE :]
        n_lost += _quantise_group(
            part, _GROUP_ELEMS, _GROUP_NBYTES, per_unit, steps, whole, codes, lanes, room
        )
    at = len(delta) - left
    codes, width = trits[:, at // _PER_BYTE :], -(-left // _PER_BYTE)
    n_lost += _quantise_group(
        delta[at:], left, width, per_unit, steps, units[at:], codes, lanes, room
    )
    for tier in range(N_TIERS):
        for lane in range(_GROUP_ELEMS):
            residual_sq[tier] += lanes[tier, lane]
        if n_lost:
            residual_sq[tier] = np.inf


@numba.njit(inline="always")
def _quantise_group(
    delta: Any,
    m: Any,
    width: Any,
    per_unit: Any,
    steps: Any,
    units: Any,
    trits: Any,
    lanes: Any,
    room: Any,
) -> Any:
    """Encode m elements, whose bytes are `width`; how many of them are not finite."""
    rest, number, digits = room
    n_lost = 0
    for e in range(m):
        is_finite = delta[e] - delta[e] == _ZERO
        n_lost += not is_finite
        x = delta[e] * per_unit if is_finite else _ZERO
        whole = (min(max(x, -_MOST), _MOST) + _ROUND) - _ROUND
        rest[e] = (x - whole) * _THREE
        number[e] = np.int32(whole)
        units[e] = np.int8(number[e])
    _add_residual(delta, m, number, steps[0], lanes[0])
    for tier in range(1, N_TIERS):
        for e in range(m):
            trit = np.int32(rest[e] > _HALF) - np.int32(rest[e] < -_HALF)
            rest[e] = (rest[e] - np.float32(trit)) * _THREE
            number[e] = number[e] * np.int32(3) + trit
            digits[e] = np.uint16(trit + 1)
        digits[m:] = 1
        _add_residual(delta, m, number, steps[tier], lanes[tier])
        _join(digits, width, trits[tier - 1])
    return n_lost


@numba.njit(inline="always")
def _join(digits: Any, width: Any, out: Any) -> None:
    """Fill `out` [width] with bytes of five trits, `width` apart in `digits`."""
    for j in range(width):
        code = digits[j]
        for i in range(1, _PER_BYTE):
            code = np.uint16(code * 3 + digits[i * width + j])
        # Out of 256, not of 243: then each trit is a product's upper byte.
        out[j] = np.uint8((np.uint32(code) * np.uint32(256) + 242) // np.uint32(243))


@numba.njit(inline="always")
def _add_residual(delta: Any, m: Any, number: Any, step: Any, lanes: Any) -> None:
    for e in range(m):
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
    number = np.empty(_GROUP_ELEMS, np.int16)
    rest = len(out) % _GROUP_ELEMS
    for at in range(0, len(out) - rest, _GROUP_ELEMS):
        # Loops whose lengths are known have no ends to look after: they take half as long.
        _add_up(units, trits, n_tiers, at, _GROUP_ELEMS, _GROUP_NBYTES, number)
        part = out[at : at + _GROUP_ELEMS]
        for e in range(_GROUP_ELEMS):
            part[e] = np.float32(number[e]) * step
    at = len(out) - rest
    _add_up(units, trits, n_tiers, at, rest, -(-rest // _PER_BYTE), number)
    for e in range(rest):
        out[at + e] = np.float32(number[e]) * step


@numba.njit(inline="always")
def _add_up(units: Any, trits: Any, n_tiers: Any, at: Any, m: Any, width: Any, number: Any) -> None:
    """Let `number` be what the tiers add up to, for the group of m elements from `at` on."""
    whole = units[at : at + m]
    for e in range(m):
        number[e] = np.int8(whole[e]) if len(whole) else np.int16(0)
    first = at // _PER_BYTE
    if n_tiers > 1:
        _add_trits(trits[0][first : first + width], width, number)
    if n_tiers > 2:
        _add_trits(trits[1][first : first + width], width, number)
    if n_tiers > 3:
        _add_trits(trits[2][first : first + width], width, number)


@numba.njit(inline="always")
def _add_trits(trits: Any, width: Any, number: Any) -> None:
    """Let `number` be three times itself and a trit more, of a group with the bytes `trits`."""
    if not len(trits):
        for e in range(_PER_BYTE * width):
            number[e] = np.int16(number[e] * np.int16(3))
        return
    power = np.uint16(1)
    for i in range(_PER_BYTE):
        for j in range(width):
            left = np.uint16(np.uint16(trits[j]) * power) & np.uint16(255)
            digit = np.int16(np.uint16(left * np.uint16(3)) >> np.uint16(8))
            e = i * width + j
            number[e] = np.int16(np.int16(number[e] * np.int16(3)) + digit - np.int16(1))
        power = np.uint16(power * np.uint16(3))
