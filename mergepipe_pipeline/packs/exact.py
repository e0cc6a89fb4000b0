"""The tiers X20 and X, compiled: the expert's own bits as integer distances to the base's.

Bits are ordered as the numbers they mean, bijectively: −0 lies below +0, and every NaN keeps its
payload. A distance wraps around, and alternates between above and below, so that small ones have
small numbers. X20 has the stream of the large ones, in which the others are hidden; X has that of
those that X20 hides.
"""

from __future__ import annotations

import threading
from typing import Any

import numba
import numpy as np

from mergepipe_pipeline.arrays import F32Array, I64Array, U8Array, U32Array, U64Array
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS
from mergepipe_pipeline.jit import cached_njit
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


class _Room(threading.local):
    """Memory for one chunk, used again: fresh pages cost more than decoding."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.stream = np.empty(STREAM_NBYTES, np.uint8)
        self.bytes = np.empty((3, CHUNK_ELEMS), np.uint8)
        self.numbers = np.empty(CHUNK_ELEMS, np.uint32)


_room = _Room()


def encode_exact(
    expert: Bits, base: Bits, delta: F32Array, least: np.uint32
) -> tuple[bytes, bytes, float]:
    """The frames of X20 and X of a chunk [n], and Σδ² of what X20 leaves out.

    X20 has the elements whose bits(|δ|) are `least` or more. A frame of nothing has no bytes.
    """
    n = len(expert)
    is_hidden, exponents = _room.bytes[0, :n], _room.bytes[1, :n]
    folded = np.empty_like(expert)
    n_hidden, left_out = _fold(expert, base, delta, least, is_hidden, folded)
    exponents_of(base, exponents)
    x20 = _stream(folded, is_hidden, exponents) if n_hidden < n else b""
    rest = folded[:n_hidden]
    _keep_hidden(is_hidden, exponents, folded)
    is_hidden[:] = 0
    x = _stream(rest, is_hidden[:n_hidden], exponents[:n_hidden]) if rest.any() else b""
    return x20, x, left_out


def _stream(numbers: Numbers, is_hidden: U8Array, exponents: U8Array) -> bytes:
    tables, stream = _room.tables, _room.stream
    nbytes = encode(numbers, is_hidden, exponents, tables.codes, tables.words, stream)
    return stream[:nbytes].tobytes()


def restore(
    raw: U8Array,
    frames: tuple[I64Array, I64Array],
    chunks: tuple[I64Array, I64Array, I64Array],
    base: Bits,
    out: Bits,
) -> int:
    """Put into `out` the bits of chunks, given those of `base`.

    Args:
        raw: what frames lie in.
        frames: where those of X20 and of X begin, and their bytes: int64 [2, chunks] each. Of no
            bytes, none: elements that no frame has are the base's.
        chunks: where the elements go, how many they are, and where the base's begin: [chunks] each.
        base: the base's bits.
        out: gets the expert's.

    Gives the number of the first chunk that cannot be decoded, or −1.
    """
    tables, (is_hidden, exponents, rest) = _room.tables, _room.bytes
    return _restore(
        raw,
        *frames,
        *chunks,
        base,
        tables.slots,
        tables.words,
        is_hidden,
        exponents,
        rest,
        _room.numbers.view(out.dtype),
        out,
    )


@cached_njit(nogil=True)
def _restore(
    raw: U8Array,
    starts: I64Array,
    nbytes: I64Array,
    places: I64Array,
    elems: I64Array,
    base_places: I64Array,
    base: Bits,
    slots: U64Array,
    words: U32Array,
    is_hidden: U8Array,
    exponents: U8Array,
    hidden_exponents: U8Array,
    rest: Bits,
    out: Bits,
) -> int:
    for chunk in range(len(elems)):
        n, place, base_place = elems[chunk], places[chunk], base_places[chunk]
        part, base_part = out[place : place + n], base[base_place : base_place + n]
        if nbytes[0, chunk] == 0 and nbytes[1, chunk] == 0:
            part[:] = base_part
            continue
        exponents_of(base_part, exponents[:n])
        is_hidden[:n] = 1
        part[:] = 0
        if nbytes[0, chunk]:
            stream = raw[starts[0, chunk] : starts[0, chunk] + nbytes[0, chunk]]
            if not decode(stream, exponents[:n], slots, words, part, is_hidden[:n]):
                return chunk
        if nbytes[1, chunk]:
            m = np.uint64(0)
            for e in range(n):
                hidden_exponents[m] = exponents[e]
                m += np.uint64(is_hidden[e])
            stream = raw[starts[1, chunk] : starts[1, chunk] + nbytes[1, chunk]]
            # The exponents are of no more use: there is room for which of the rest are hidden.
            flags = exponents[:m]
            if not decode(stream, hidden_exponents[:m], slots, words, rest[:m], flags):
                return chunk
            if flags.any():
                return chunk
            _put_hidden(rest, is_hidden[:n], part)
        _add_to(base_part, part)
    return -1


@cached_njit(nogil=True)
def _keep_hidden(is_hidden: U8Array, exponents: U8Array, numbers: Bits) -> None:
    """Move the exponents and numbers of hidden elements to the front of their arrays."""
    at = np.uint64(0)
    for e in range(len(is_hidden)):
        exponents[at], numbers[at] = exponents[e], numbers[e]
        at += np.uint64(is_hidden[e])


@cached_njit(nogil=True)
def _put_hidden(rest: Bits, is_hidden: U8Array, out: Bits) -> None:
    """Put numbers in order where `out` [n] hides one, which is 0 there; without branches."""
    number, at = out.dtype.type, np.uint64(0)
    for e in range(len(out)):
        out[e] |= rest[at] & number(number(0) - number(is_hidden[e]))
        at += np.uint64(is_hidden[e])


@cached_njit(nogil=True)
def _fold(
    expert: Bits, base: Bits, delta: F32Array, least: np.uint32, is_hidden: U8Array, out: Bits
) -> tuple[int, float]:
    """Fill `out` [n] with distances, and `is_hidden` [n]: whose bits(|δ|) are below `least`.

    Gives how many these are, and their Σδ².
    """
    number = out.dtype.type
    one, most = number(1), number(number(-1) >> number(1))
    n, bits = len(out), delta.view(np.uint32)
    lanes = np.zeros(_LANES)
    for at in range(0, n, _LANES):
        part, part_bits = delta[at : at + _LANES], bits[at : at + _LANES]
        flags = is_hidden[at : at + _LANES]
        for i in range(len(part)):
            flags[i] = (part_bits[i] & _SIZE) < least
            left_out = np.float64(part[i] if flags[i] else _ZERO)
            lanes[i] += left_out * left_out
    for e in range(n):
        distance = number(_ordered(expert[e], number) - _ordered(base[e], number))
        is_below = number(distance > most)
        out[e] = number(distance << one) ^ number(number(0) - is_below)
    n_hidden, energy = 0, 0.0
    for e in range(n):
        n_hidden += is_hidden[e]
    for lane in range(_LANES):
        energy += lanes[lane]
    return n_hidden, energy


@cached_njit(nogil=True)
def _add_to(base: Bits, out: Bits) -> None:
    """Turn distances `out` [n] to `base` [n] into bits; a loop of its own is vectorized."""
    number = out.dtype.type
    one = number(1)
    for e in range(len(base)):
        distance = number(out[e] >> one) ^ number(number(0) - number(out[e] & one))
        out[e] = _ordered(number(_ordered(base[e], number) + distance), number)


@numba.njit(inline="always")
def _ordered(bits: Any, number: Any) -> Any:
    """All but the sign turned over in a negative number; twice is nothing.

    No shift by a number that is not known when it is compiled: loops of it are not vectorized.
    """
    most = number(number(-1) >> number(1))
    return number(bits ^ (most if bits > most else number(0)))
