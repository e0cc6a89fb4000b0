"""The tiers L0 to L3, compiled: δ in ever finer steps, each a third of the one before.

A tier's number says how δ̂ is corrected: L0 is a whole number of units (mostly none: it is for
outliers), each later one a trit. Numbers of tiers add up as integers, as does what factors give,
all in steps of an 81st of a unit, and are multiplied once by it: so δ̂ has one rounding, and no
order of additions.

Five trits are a byte. Byte j of a group of 64 holds elements j, j + 64, j + 128 … of the group's
320, so that loops go over neighbours, and elements of one row of a matrix stay together.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F32Array, F64Array, I16Array, I64Array, U8Array, U32Array
from mergepipe_pipeline.domain.pack import STEPPED, TIERS
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.packs.frames import ABSENT, content_at

#: Tiers there are: L0 and those of trits.
N_TIERS = len(STEPPED)
#: Steps of δ̂ in a unit.
STEPS = 81
PER_BYTE = 5
_GROUP_NBYTES = 64
_GROUP_ELEMS = PER_BYTE * _GROUP_NBYTES
_MOST = np.float32(127)
_HALF, _THREE, _ZERO = np.float32(0.5), np.float32(3), np.float32(0)
#: Added and taken away again, it rounds a small float32 to the nearest integer, ties to even.
_ROUND = np.float32(12582912)
_L0, _X20 = TIERS.index("L0"), TIERS.index("X20")
_SIZE = np.uint32(0x7FFFFFFF)
#: Five trits of zero.
NO_TRITS = np.uint8(128)


def trit_nbytes(n: int) -> int:
    """Bytes that a tier of trits takes for n elements."""
    return -(-n // PER_BYTE)


def step_of(unit: float) -> np.float32:
    """What δ̂ of a tensor with this unit is a whole number of."""
    return np.float32(unit / STEPS)


@cached_njit(nogil=True)
def quantise(
    delta: F32Array,
    near: I16Array,
    per_unit: np.float32,
    step: np.float32,
    units: npt.NDArray[np.int8],
    trits: U8Array,
    residual_sq: F64Array,
) -> None:
    """Encode what `near` [n] steps leave of `delta` [n].

    Fills `units` [n] and `trits` [N_TIERS − 1, trit_nbytes(n)]. `per_unit` is 1 over the unit.
    Adds ‖δ − δ̂‖² of each level to `residual_sq` [N_TIERS]. What is not finite becomes zero and
    makes residuals infinite.
    """
    scratch = np.empty((3, _GROUP_ELEMS), np.float32), np.empty(_GROUP_ELEMS, np.uint16)
    # A lane for each element of a group: the sums have one order whatever the CPU.
    lanes = np.zeros((N_TIERS, _GROUP_ELEMS))
    n_tail, n_lost = len(delta) % _GROUP_ELEMS, 0
    for at in range(0, len(delta) - n_tail, _GROUP_ELEMS):
        some = slice(at, at + _GROUP_ELEMS)
        part, codes = (delta[some], near[some], units[some]), trits[:, at // PER_BYTE :]
        n_lost += _quantise_group(part, _GROUP_NBYTES, per_unit, step, codes, lanes, scratch)
    if n_tail:  # filled up with zeros
        at = len(delta) - n_tail
        last, last_near = np.zeros(_GROUP_ELEMS, np.float32), np.zeros(_GROUP_ELEMS, np.int16)
        last[:n_tail], last_near[:n_tail] = delta[at:], near[at:]
        part, codes = (last, last_near, np.empty(_GROUP_ELEMS, np.int8)), trits[:, at // PER_BYTE :]
        width = -(-n_tail // PER_BYTE)
        n_lost += _quantise_group(part, width, per_unit, step, codes, lanes, scratch)
        units[at:] = part[2][:n_tail]
    for tier in range(N_TIERS):
        for lane in range(_GROUP_ELEMS):
            residual_sq[tier] += lanes[tier, lane]
        if n_lost:
            residual_sq[tier] = np.inf


@cached_njit(nogil=True)
def left(delta: F32Array, near: I16Array, step: np.float32) -> float:
    """‖δ − δ̂‖² of `delta` [n], where δ̂ is `near` [n] steps; infinite where δ is not finite."""
    # A lane for each element of a group: the sum has one order whatever the CPU.
    lanes = np.zeros(_GROUP_NBYTES)
    n_tail = len(delta) % _GROUP_NBYTES
    for at in range(0, len(delta) - n_tail, _GROUP_NBYTES):
        for lane in range(_GROUP_NBYTES):
            place = np.uint64(at) + np.uint64(lane)
            difference = np.float64(delta[place]) - np.float64(np.float32(near[place]) * step)
            lanes[lane] += difference * difference
    total = 0.0
    for e in range(len(delta) - n_tail, len(delta)):
        difference = np.float64(delta[e]) - np.float64(np.float32(near[e]) * step)
        total += difference * difference
    for lane in range(_GROUP_NBYTES):
        total += lanes[lane]
    return total if total == total else np.inf


# Loops over arrays of their own, whose lengths are known, are vectorized. Numbers of steps are
# exact as float32; integers of 32 bits would be turned into these at every tier.
@numba.njit(inline="always")
def _quantise_group(
    part: Any, width: Any, per_unit: Any, step: Any, trits: Any, lanes: Any, scratch: Any
) -> Any:
    """Encode a group, whose bytes are `width`; how many of its elements are not finite."""
    delta, near_steps, units = part
    (near, rest, number), digits = scratch
    n_lost, in_steps = 0, np.float32(STEPS)
    for e in range(_GROUP_ELEMS):
        near[e] = np.float32(near_steps[e])
    for e in range(_GROUP_ELEMS):
        n_lost += delta[e] - delta[e] != _ZERO  # infinite, or no number
        number[e], rest[e] = _in_units(delta[e] - near[e] * step, per_unit)
    for e in range(_GROUP_ELEMS):
        units[e] = np.int8(number[e])
    for tier in range(N_TIERS):
        if tier:
            in_steps = np.float32(in_steps / _THREE)
            for e in range(_GROUP_ELEMS):
                trit = np.float32(_trit(rest[e]))
                rest[e] = (rest[e] - trit) * _THREE
                number[e] = number[e] * _THREE + trit
                digits[e] = np.uint16(np.int32(trit) + 1)
            _join(digits, width, trits[tier - 1])
        sums = lanes[tier]
        for e in range(_GROUP_ELEMS):
            told = (number[e] * in_steps + near[e]) * step
            difference = np.float64(delta[e]) - np.float64(told)
            sums[e] += difference * difference
    return n_lost


@numba.njit(inline="always")
def _join(digits: Any, width: Any, out: Any) -> None:
    """Fill `out` [width] with bytes of five trits, `width` apart in `digits`."""
    for j in range(width):
        code = digits[j]
        for i in range(1, PER_BYTE):
            code = np.uint16(code * 3 + digits[i * width + j])
        # Out of 256, not of 243: then each trit is a product's upper byte.
        out[j] = np.uint8((np.uint32(code) * np.uint32(256) + 242) // np.uint32(243))


@cached_njit(nogil=True)
def _nearest(
    delta: F32Array, per_unit: np.float32, step: np.float32, tier: int, scratch: Any, out: F32Array
) -> None:
    """Fill `out` [n] with δ̂ of `delta` [n] as the tiers up to one, counted from L0, add up to it.

    `scratch` is float32 [n] and int32 [n].
    """
    rest, number = scratch
    for e in range(len(delta)):
        whole, rest[e] = _in_units(delta[e], per_unit)
        number[e] = np.int32(whole)
    for _ in range(tier):
        for e in range(len(delta)):
            trit = _trit(rest[e])
            rest[e] = (rest[e] - np.float32(trit)) * _THREE
            number[e] = number[e] * np.int32(3) + trit
    in_steps = np.int32(STEPS // 3**tier)
    for e in range(len(delta)):
        out[e] = np.float32(number[e] * in_steps) * step


def quantised(
    delta: F32Array,
    units: F64Array,
    thresholds_bits: U32Array,
    tiers: npt.NDArray[np.int8],
) -> F32Array:
    """δ̂ of `delta` [experts, rows, n] as decoders give it without factors: plans try it on samples.

    `units` and `thresholds_bits` [experts] are those of packed tensors. Each row is read at the
    level of one of TIERS, `tiers` [experts, rows], or NOT_READ. Lossy levels make zeros of what is
    not finite.
    """
    out = np.empty_like(delta)
    per_unit, step = (1 / units).astype(np.float32), np.array([step_of(u) for u in units.tolist()])
    _quantise_rows(delta, per_unit, step, np.maximum(thresholds_bits, 1), tiers, out)
    return out


@cached_njit(nogil=True)
def _quantise_rows(
    delta: F32Array,
    per_unit: F32Array,
    step: F32Array,
    least: U32Array,
    tiers: npt.NDArray[np.int8],
    out: F32Array,
) -> None:
    """Do as `quantised`, into `out`; `per_unit` and `step` [experts]."""
    n = delta.shape[2]
    # [n] each: a row in units, and as integers.
    scratch = np.empty(n, np.float32), np.empty(n, np.int32)
    for e in range(delta.shape[0]):
        for r in range(delta.shape[1]):
            tier, row = tiers[e, r], out[e, r]
            if tier < _L0:
                row[:] = 0
            elif tier < _X20:
                _nearest(delta[e, r], per_unit[e], step[e], tier - _L0, scratch, row)
            else:
                row[:] = delta[e, r]
                if tier == _X20:
                    bits = row.view(np.uint32)
                    for i in range(n):
                        if bits[i] & _SIZE < least[e]:
                            row[i] = 0


@numba.njit(inline="always")
def _in_units(delta: Any, per_unit: Any) -> Any:
    """The whole units of an element, and thrice the rest; zeros if it is not finite."""
    x = delta * per_unit if delta - delta == _ZERO else _ZERO
    whole = (min(max(x, -_MOST), _MOST) + _ROUND) - _ROUND
    return whole, (x - whole) * _THREE


@numba.njit(inline="always")
def _trit(rest: Any) -> Any:
    return np.int32(rest > _HALF) - np.int32(rest < -_HALF)


@cached_njit(nogil=True)
def add_up(
    raw: U8Array,
    unpacked: U8Array,
    places: I64Array,
    counts: I64Array,
    starts: I64Array,
    elems: I64Array,
    out: I16Array,
) -> None:
    """Put the sum of the tiers into `out`: δ̂ in steps.

    `starts` [chunks] is where a chunk's `elems` [chunks] begin; it has the first `counts` [chunks]
    tiers, or none. `places` [tiers, chunks] are those of contents: bits of int8 [n] of L0, whose
    absent ones are zeros, then trits, whose absent ones lie in front of `unpacked`.
    """
    for chunk in range(len(counts)):
        first, n, n_tiers = starts[chunk], elems[chunk], counts[chunk]
        if n_tiers == 0:
            out[first : first + n] = 0
            continue
        x, at_x = content_at(raw, unpacked, places[min(1, n_tiers - 1), chunk])
        y, at_y = content_at(raw, unpacked, places[min(2, n_tiers - 1), chunk])
        z, at_z = content_at(raw, unpacked, places[n_tiers - 1, chunk])
        rest = n % _GROUP_ELEMS
        for start in range(0, n - rest, _GROUP_ELEMS):
            # Loops whose lengths are known have no ends to look after: they take half as long.
            at = np.uint64(start // PER_BYTE)
            trits = (x, at_x + at, y, at_y + at, z, at_z + at)
            _add_trits(trits, n_tiers, np.uint64(first + start), _GROUP_NBYTES, out)
        if rest:
            start, last = n - rest, np.empty(_GROUP_ELEMS, np.int16)
            at, width = np.uint64(start // PER_BYTE), -(-rest // PER_BYTE)
            trits = (x, at_x + at, y, at_y + at, z, at_z + at)
            _add_trits(trits, n_tiers, np.uint64(0), width, last)
            out[first + start : first + n] = last[:rest]
        if places[0, chunk] != ABSENT:
            units, at = content_at(raw, unpacked, places[0, chunk])
            for i in range(n):
                unit = np.int16(np.int8(units[at + np.uint64(i)]))
                out[np.uint64(first) + np.uint64(i)] += np.int16(unit * np.int16(STEPS))


# Arrays and places in them, not slices: for each slice an atomic counter goes up and down, which
# takes as long as a group's arithmetic. Unsigned, so that no place is looked at for being negative.
@numba.njit(inline="always")
def _add_trits(trits: Any, n_tiers: Any, first: Any, width: Any, out: Any) -> None:
    """Let `out` be, from `first` on, what a group's trits add up to: three arrays and places."""
    x, at_x, y, at_y, z, at_z = trits
    power = np.uint16(1)
    for i in range(PER_BYTE):
        e = first + np.uint64(i * width)
        if n_tiers == 1:
            for j in range(width):
                out[e + np.uint64(j)] = 0
        elif n_tiers == 2:
            for j in range(width):
                k = np.uint64(j)
                out[e + k] = np.int16(_digit(x[at_x + k], power) * np.int16(27)) - np.int16(27)
        elif n_tiers == 3:
            for j in range(width):
                k = np.uint64(j)
                number = _digit(x[at_x + k], power) * np.int16(27)
                number += _digit(y[at_y + k], power) * np.int16(9)
                out[e + k] = number - np.int16(36)
        else:
            for j in range(width):
                k = np.uint64(j)
                number = _digit(x[at_x + k], power) * np.int16(27)
                number += _digit(y[at_y + k], power) * np.int16(9)
                number += _digit(z[at_z + k], power) * np.int16(3)
                out[e + k] = number - np.int16(39)
        power = np.uint16(power * np.uint16(3))


@numba.njit(inline="always")
def _digit(code: Any, power: Any) -> Any:
    """One of a byte's five digits, 0 to 2; `power` is 3 to how many come before it."""
    fraction = np.uint16(np.uint16(code) * power) & np.uint16(255)
    return np.int16(np.uint16(fraction * np.uint16(3)) >> np.uint16(8))
