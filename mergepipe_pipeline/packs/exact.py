"""The tiers X20 and X, compiled: the expert's own bits as integer distances to known ones.

Bits are ordered as the numbers they mean, bijectively: −0 lies below +0, and every NaN keeps its
payload. A distance wraps around, and alternates between below and above, so that small ones have
small numbers. X20 has those of elements with large deltas to the base's; in its stream the others
are hidden. X has those of all elements to what the tensor's factors make of the base's, the side
first on which that was rounded off; without factors, to the base's.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numba
import numpy as np

from mergepipe_pipeline.arrays import (
    F32Array,
    I16Array,
    I64Array,
    U8Array,
    U16Array,
    U32Array,
    U64Array,
)
from mergepipe_pipeline.bfloat16 import nearest
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.operators.kernels.bits import bits_of, value_of
from mergepipe_pipeline.packs.entropy import (
    STREAM_NBYTES,
    Numbers,
    Tables,
    decode,
    encode,
    exponents_of,
)

Bits = Numbers

#: Sums are taken in so many lanes, added in order: nothing depends on the CPU's vector length.
_LANES = 256
_SIZE, _ZERO = np.uint32(0x7FFFFFFF), np.float32(0)
_INFINITY = np.uint32(0x7F800000)
_nearest = numba.njit(inline="always")(nearest)


class Prediction(NamedTuple):
    """Elements [n] as they are told without exact levels, as bits.

    `is_below` [n]: they were rounded down; empty for the base's own, which nothing was added to.
    """

    bits: Bits
    is_below: U8Array

    @classmethod
    def of_base(cls, base: Bits) -> Prediction:
        """The base's elements: of a tensor without factors."""
        return cls(base, np.empty(0, np.uint8))


class _Room(threading.local):
    """Memory for one chunk, used again: fresh pages cost more than decoding."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.stream = np.empty(STREAM_NBYTES, np.uint8)
        self.bytes = np.empty((2, CHUNK_ELEMS), np.uint8)


_room = _Room()


def encode_large(
    expert: Bits, base: Bits, delta: F32Array, least: np.uint32
) -> tuple[bytes, float]:
    """The frame of X20 of a chunk [n], and Σδ² of what it leaves out.

    It has the elements whose bits(|δ|) are `least` or more; none of these, no bytes.
    """
    is_hidden = _room.bytes[1, : len(expert)]
    n_hidden, left_out = _hide(delta, least, is_hidden)
    if n_hidden == len(expert):
        return b"", left_out
    return _stream(expert, Prediction.of_base(base), is_hidden), left_out


def encode_all(expert: Bits, near: Prediction) -> bytes:
    """The frame of X of a chunk [n], of which `near` is known."""
    is_hidden = _room.bytes[1, : len(expert)]
    is_hidden[:] = 0
    return _stream(expert, near, is_hidden)


def _stream(expert: Bits, near: Prediction, is_hidden: U8Array) -> bytes:
    tables, stream = _room.tables, _room.stream
    exponents, folded = _room.bytes[0, : len(expert)], np.empty_like(expert)
    exponents_of(near.bits, exponents)
    _fold(expert, *near, folded)
    nbytes = encode(folded, is_hidden, exponents, tables.codes, tables.words, stream)
    return stream[:nbytes].tobytes()


@cached_njit(nogil=True)
def predict_bf16(
    base: U16Array, numbers: I16Array, step: np.float32, bits: U16Array, is_below: U8Array
) -> None:
    """Fill `bits` and `is_below` [n] with the bfloat16 nearest to base + numbers · step."""
    for e in range(len(bits)):
        told = value_of(base[e]) + np.float32(numbers[e]) * step
        pattern: Any = bits_of(told)  # type: ignore[call-arg]
        keeps = numbers[e] == 0 or (pattern & _SIZE) > _INFINITY
        rounded = base[e] if keeps else np.uint16(_nearest(pattern))
        bits[e], is_below[e] = rounded, value_of(rounded) < told


def restore(
    raw: U8Array,
    frames: tuple[I64Array, I64Array],
    chunks: tuple[I64Array, I64Array, I64Array, I64Array],
    base: Bits,
    near: Prediction,
    out: Bits,
) -> int:
    """Put into `out` the bits of chunks, given those of `base` and what is predicted.

    Args:
        raw: what frames lie in.
        frames: where those of X20 and of X begin, and their bytes: int64 [2, chunks] each. Of no
            bytes, none: elements that no frame has are the base's. Where there is one of X, that of
            X20 is not looked at.
        chunks: where the elements go, how many they are, where the base's begin, and where those
            that are predicted: [chunks] each.
        base: the base's bits.
        near: the predicted ones.
        out: gets the expert's.

    Gives the number of the first chunk that cannot be decoded, or −1.
    """
    tables, (exponents, is_hidden) = _room.tables, _room.bytes
    room = exponents, is_hidden
    return _restore(raw, *frames, *chunks, base, *near, tables.slots, tables.words, *room, out)


@cached_njit(nogil=True)
def _restore(
    raw: U8Array,
    starts: I64Array,
    nbytes: I64Array,
    places: I64Array,
    elems: I64Array,
    base_places: I64Array,
    near_places: I64Array,
    base: Bits,
    near: Bits,
    is_below: U8Array,
    slots: U64Array,
    words: U32Array,
    exponents: U8Array,
    is_hidden: U8Array,
    out: Bits,
) -> int:
    for chunk in range(len(elems)):
        n, place, base_place = elems[chunk], places[chunk], base_places[chunk]
        part, known = out[place : place + n], base[base_place : base_place + n]
        tier, below = 0, is_below[:0]
        if nbytes[1, chunk]:
            tier, at = 1, near_places[chunk]
            known, below = near[at : at + n], is_below[at : at + n]
        elif not nbytes[0, chunk]:
            part[:] = known
            continue
        exponents_of(known, exponents[:n])
        stream = raw[starts[tier, chunk] : starts[tier, chunk] + nbytes[tier, chunk]]
        if not decode(stream, exponents[:n], slots, words, part, is_hidden[:n]):
            return chunk
        if tier == 1 and is_hidden[:n].any():
            return chunk
        _add_to(known, below, part)
    return -1


@cached_njit(nogil=True)
def _hide(delta: F32Array, least: np.uint32, is_hidden: U8Array) -> tuple[int, float]:
    """Fill `is_hidden` [n]: whose bits(|δ|) are below `least`; how many these are, and Σδ²."""
    n, bits = len(delta), delta.view(np.uint32)
    lanes = np.zeros(_LANES)
    for at in range(0, n, _LANES):
        part, part_bits = delta[at : at + _LANES], bits[at : at + _LANES]
        flags = is_hidden[at : at + _LANES]
        for i in range(len(part)):
            flags[i] = (part_bits[i] & _SIZE) < least
            left_out = np.float64(part[i] if flags[i] else _ZERO)
            lanes[i] += left_out * left_out
    n_hidden, energy = 0, 0.0
    for e in range(n):
        n_hidden += is_hidden[e]
    for lane in range(_LANES):
        energy += lanes[lane]
    return n_hidden, energy


@cached_njit(nogil=True)
def _fold(expert: Bits, near: Bits, is_below: U8Array, out: Bits) -> None:
    """Fill `out` [n] with distances to `near`, small numbers for small ones."""
    number = out.dtype.type
    one, most = number(1), number(number(-1) >> number(1))
    for e in range(len(out)):
        out[e] = number(_ordered(expert[e], number) - _ordered(near[e], number))
    _turn(is_below, out)
    for e in range(len(out)):
        is_less = number(out[e] > most)
        out[e] = number(out[e] << one) ^ number(number(0) - is_less)


@cached_njit(nogil=True)
def _add_to(near: Bits, is_below: U8Array, out: Bits) -> None:
    """Turn distances `out` [n] to `near` [n] into bits; loops of their own are vectorized."""
    number = out.dtype.type
    one = number(1)
    for e in range(len(out)):
        out[e] = number(out[e] >> one) ^ number(number(0) - number(out[e] & one))
    _turn(is_below, out)
    for e in range(len(out)):
        out[e] = _ordered(number(_ordered(near[e], number) + out[e]), number)


@numba.njit(inline="always")
def _turn(is_below: Any, distances: Any) -> None:
    """Change the sign of distances [n] to what was rounded down: more lie above it than below."""
    number = distances.dtype.type
    if len(is_below) == 0:
        return
    for e in range(len(distances)):
        turned = number(is_below[e])
        distances[e] = number(distances[e] ^ number(number(0) - turned)) + turned


@numba.njit(inline="always")
def _ordered(bits: Any, number: Any) -> Any:
    """All but the sign turned over in a negative number; twice is nothing.

    No shift by a number that is not known when it is compiled: loops of it are not vectorized.
    """
    most = number(number(-1) >> number(1))
    return number(bits ^ (most if bits > most else number(0)))
