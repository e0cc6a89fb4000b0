"""The tiers X20 and X, compiled: the expert's own bits as integer distances to the base's.

Bits are ordered as the numbers they mean, bijectively: −0 lies below +0, and every NaN keeps its
payload. A distance wraps around, and alternates between above and below, so that small ones have
small numbers, whose upper bytes are zero.

Two streams of elements are put together as a bitmap says. Where the CPU has an instruction for 32
of them (AVX-512 VBMI2) that takes 5 µs a chunk; a loop over elements 47.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic, overload

from mergepipe_pipeline.arrays import F32Array, I64Array, U8Array, U16Array, U32Array
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.packs.sections import ABSENT, content_at

Bits = U16Array | U32Array


#: Sums are taken in so many lanes, added in order: nothing depends on the CPU's vector length.
_LANES = 256
_SIZE, _ZERO = np.uint32(0x7FFFFFFF), np.float32(0)
#: Elements that the instruction takes.
_WIDTH = 32
_HAS_INSTRUCTION = bool(llvm.get_host_cpu_features().get("avx512vbmi2"))


@cached_njit(nogil=True)
def split(
    expert: Bits,
    base: Bits,
    delta: F32Array,
    least: np.uint32,
    is_large: U8Array,
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


@cached_njit()
def count_large(
    raw: U8Array, unpacked: U8Array, bitmaps: I64Array, elems: I64Array, counts: I64Array
) -> bool:
    """Fill `counts` [chunks] with how many elements each chunk's bitmap has, of its `elems`.

    `bitmaps` [chunks] are places of contents. False if a bit is set behind the last element.
    """
    for chunk in range(len(counts)):
        counts[chunk], n = 0, elems[chunk]
        if bitmaps[chunk] != ABSENT:
            source, at = content_at(raw, unpacked, bitmaps[chunk])
            bitmap = source[at : at + -(-n // 8)]
            counts[chunk] = count_ones(bitmap)
            if n % 8 and bitmap[-1] >> (n % 8):
                return False
    return True


@cached_njit(nogil=True)
def restore(
    raw: U8Array,
    unpacked: U8Array,
    bitmaps: I64Array,
    n_large: I64Array,
    large: I64Array,
    rest: I64Array,
    starts: I64Array,
    elems: I64Array,
    base_starts: I64Array,
    base: Bits,
    folded: Bits,
    out: Bits,
) -> None:
    """Put into `out` the bits that have these distances to those of `base`.

    `starts` [chunks] and `base_starts` are where a chunk's `elems` [chunks] begin. The others are
    places of contents. `bitmaps` [chunks] say which elements are large, `n_large` [chunks] how
    many. `large` [bytes, chunks] have each byte of theirs, `rest` that of the others; absent ones
    are zeros. `folded` is room for the distances of a chunk.
    """
    for chunk in range(len(n_large)):
        first, n, count = starts[chunk], elems[chunk], n_large[chunk]
        part, base_part = out[first : first + n], base[base_starts[chunk] : base_starts[chunk] + n]
        if count == 0 and (rest[:, chunk] == ABSENT).all():
            part[:] = base_part
            continue
        ordered = folded[: len(part)]
        _join(raw, unpacked, large[:, chunk], ordered[:count])
        _join(raw, unpacked, rest[:, chunk], ordered[count:])
        if count and count < len(part):
            source, at = content_at(raw, unpacked, bitmaps[chunk])
            expand(source[at : at + -(-len(part) // 8)], count, ordered, part)
        else:
            for e in range(len(part)):  # an assignment to all of it takes five times as long
                part[e] = ordered[e]
        _add_to(base_part, part)


@cached_njit(nogil=True)
def _add_to(base: Bits, out: Bits) -> None:
    """Turn distances `out` [n] to `base` [n] into bits; a loop of its own is vectorized."""
    number = out.dtype.type
    one = number(1)
    for e in range(len(base)):
        distance = number(out[e] >> one) ^ number(number(0) - number(out[e] & one))
        out[e] = _ordered(number(_ordered(base[e], number) + distance), number)


@numba.njit
def _join(raw: Any, unpacked: Any, places: Any, out: Any) -> None:
    """Fill `out` [n] with numbers whose bytes lie at `places`."""
    number = out.dtype.type
    if places[0] != ABSENT:
        source, at = content_at(raw, unpacked, places[0])
        first = source[at : at + len(out)]
        for e in range(len(out)):
            out[e] = first[e]
    else:
        out[:] = 0
    for p in range(1, len(places)):
        if places[p] != ABSENT:
            source, at = content_at(raw, unpacked, places[p])
            plane, shift = source[at : at + len(out)], number(8 * p)
            for e in range(len(out)):
                out[e] |= number(number(plane[e]) << shift)


@numba.njit(inline="always")
def _ordered(bits: Any, number: Any) -> Any:
    """All but the sign turned over in a negative number; twice is nothing.

    No shift by a number that is not known when it is compiled: loops of it are not vectorized.
    """
    most = number(number(-1) >> number(1))
    return number(bits ^ (most if bits > most else number(0)))


@cached_njit(nogil=True)
def count_ones(bitmap: U8Array) -> int:
    """The number of bits that are set."""
    count = 0
    for i in range(len(bitmap)):
        count += _ones(np.uint32(bitmap[i]))  # type: ignore[call-arg]
    return count


@cached_njit(nogil=True)
def expand(bitmap: U8Array, n_first: int, ordered: Bits, out: Bits) -> None:
    """Fill `out` [n] from `ordered` [n], where the `n_first` elements of the bitmap come first."""
    done, at_first = _expand_words(bitmap, n_first, ordered, out)
    first, rest = np.uint64(at_first), np.uint64(n_first + done - at_first)
    for e in range(done, len(out)):
        flag = np.uint64(bitmap[e >> 3] >> (e & 7)) & np.uint64(1)
        out[e] = ordered[first] if flag else ordered[rest]
        first += flag
        rest += np.uint64(1) - flag


def _expand_words(bitmap: Any, n_first: Any, ordered: Any, out: Any) -> Any:
    """Expand whole words by the instruction; how many elements, and how many the bitmap has."""
    raise NotImplementedError


@overload(_expand_words)
def _expand_words_for(bitmap: Any, n_first: Any, ordered: Any, out: Any) -> Any:
    def by_instruction(bitmap: Any, n_first: Any, ordered: Any, out: Any) -> Any:
        size, words = np.uint64(2), len(out) // _WIDTH
        first = np.uint64(ordered.ctypes.data)
        rest, place = first + size * np.uint64(n_first), np.uint64(out.ctypes.data)
        at_first = 0
        for w in range(words):
            bits = np.uint32(0)
            for i in range(4):
                bits |= np.uint32(bitmap[4 * w + i]) << np.uint32(8 * i)
            _expand_load(first, rest, bits, place)  # type: ignore[call-arg]
            count = np.uint64(_ones(bits))
            first += size * count
            rest += size * (np.uint64(_WIDTH) - count)
            place += size * np.uint64(_WIDTH)
            at_first += np.int64(count)
        return words * _WIDTH, at_first

    def nothing(bitmap: Any, n_first: Any, ordered: Any, out: Any) -> Any:
        return 0, 0

    return by_instruction if _HAS_INSTRUCTION and out.dtype == numba.uint16 else nothing


@intrinsic
def _expand_load(context: Any, first: Any, rest: Any, bits: Any, place: Any) -> Any:
    """Store at address `place` 32 elements: those whose bits are set from address `first`.

    The others are from address `rest`. Nothing is read behind what the bits ask for.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element, mask = ir.IntType(16), ir.VectorType(ir.IntType(1), _WIDTH)
        vector, pointer = ir.VectorType(element, _WIDTH), element.as_pointer()
        kind = ir.FunctionType(vector, [pointer, mask, vector])
        name = f"llvm.masked.expandload.v{_WIDTH}i16"
        load = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        a, b = (builder.inttoptr(address, pointer) for address in arguments[:2])
        chosen = builder.bitcast(arguments[2], mask)
        unset = builder.bitcast(builder.not_(arguments[2]), mask)
        merged = builder.call(load, [a, chosen, ir.Constant(vector, ir.Undefined)])
        merged = builder.call(load, [b, unset, merged])
        store = builder.store(merged, builder.inttoptr(arguments[3], vector.as_pointer()))
        store.align = 2
        return context.get_dummy_value()

    address, word = numba.uint64, numba.uint32
    return numba.void(address, address, word, address), generate


@intrinsic
def _ones(context: Any, bits: Any) -> Any:
    """The number of bits that are set, of 32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return numba.uint32(numba.uint32), generate
