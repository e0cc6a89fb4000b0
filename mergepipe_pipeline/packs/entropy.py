"""Numbers at the entropy of what is known of them, compiled: range asymmetric numeral systems.

Numbers are coded with a table of frequencies of their own for each exponent that the base's
elements have: a delta is rounded to the grid of the weight it is added to, so how many steps of the
grid it is follows from the exponent more than from anything else. Small numbers have a symbol each,
larger ones a symbol for a quarter of their octave and the bits below it as they are.

A stream is its tables, the state of each lane, and words. The tables: a byte that says how many
exponents have a table of their own, these in rising order, a byte each, and bits: for each of them,
and for all other exponents together, 8 bits for how many symbols it has, 7 for the one that gets
what the others leave, and for each other how many bits its frequency has, as the difference to the
one before (0, −1, 1, −2 …; half of it in ones, which a zero ends, then a bit), and three bits below
the leading one. Frequencies add up to 1024. After Duda, arXiv:1311.2540, and Giesen,
arXiv:1402.3392 (lanes).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from mergepipe_pipeline.arrays import U8Array, U16Array, U32Array, U64Array
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS
from mergepipe_pipeline.jit import cached_njit

Numbers = U16Array | U32Array

_BITS, _LANES = 10, 4
_TOTAL = 1 << _BITS
#: Bits of a frequency that are kept.
_KEPT = 4
#: Numbers below have a symbol of their own; their logarithm.
_SMALL = 3
_SYMBOLS = 128
#: The symbol of a number that is not in the stream.
_HIDDEN = 127
#: An exponent has a table of its own from so many elements on: a table takes about 20 bytes.
_OWN = 512
_EXPONENTS = 256
#: A state is no less between two numbers, of 64 bits; it takes in words of 32.
_LEAST = np.uint64(1 << 31)
#: Bits of a number that one step takes beside its symbol: more would not fit a state.
_RAW = 16
_STATE_NBYTES = 8
#: No stream of a chunk is longer.
STREAM_NBYTES = 8 * CHUNK_ELEMS + 2 * _EXPONENTS * _SYMBOLS

_U64, _WORD = np.uint64, np.uint64(0xFFFFFFFF)
_ONE, _N_BITS, _HALF = np.uint64(1), np.uint64(_BITS), np.uint64(32)
_MASK = np.uint64(_TOTAL - 1)


@intrinsic
def _high(context: Any, a: Any, b: Any) -> Any:
    """The upper half of a product of two numbers of 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, narrow = ir.IntType(128), ir.IntType(64)
        a, b = (builder.zext(x, wide) for x in arguments)
        product = builder.mul(a, b)
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), narrow)

    return numba.uint64(numba.uint64, numba.uint64), generate


def _values() -> U64Array:
    """By symbol, the least number that has it, and above 40 bits how many bits follow."""
    numbers = list(range(1 << _SMALL))
    raw = [0] * len(numbers)
    for octave in range(_SMALL, 32):
        numbers += [(4 + quarter) << (octave - 2) for quarter in range(4)]
        raw += [octave - 2] * 4
    left = [0] * (_SYMBOLS - len(numbers))
    return np.array([*numbers, *left], np.uint64) | np.array([*raw, *left], np.uint64) << _U64(40)


_VALUES = _values()


class Tables:
    """Room for the tables, the codes and the words of a stream; of one thread."""

    def __init__(self) -> None:
        self.codes = np.empty(CHUNK_ELEMS, np.uint16)
        self.slots = np.empty((_EXPONENTS + 1) * _TOTAL, np.uint64)
        self.words = np.empty(STREAM_NBYTES // 4, np.uint32)


@cached_njit(nogil=True)
def exponents_of(bits: Numbers, out: U8Array) -> None:
    """Fill `out` [n] with the exponents of float32 or bfloat16 numbers.

    Of float16 it is the exponent and the mantissa's first three bits, which serve as well.
    """
    number = bits.dtype.type
    shift = number(23 if number(number(0) - number(1)) > number(0xFFFF) else 7)
    for i in range(len(out)):
        out[i] = (bits[i] >> shift) & number(255)


@cached_njit(nogil=True)
def encode(
    numbers: Numbers,
    is_hidden: U8Array,
    exponents: U8Array,
    codes: U16Array,
    words: U32Array,
    out: U8Array,
) -> int:
    """Fill `out`, of STREAM_NBYTES, with a stream of numbers [n]; how many bytes it has.

    Of those that are hidden the stream says that they are, and not which number. There is room for
    n `codes` and 2n + 1 `words`.
    """
    n, table_of = len(numbers), np.zeros(_EXPONENTS, np.uint16)
    n_tables = 1 + _own_tables(exponents, table_of, out)
    _fill_codes(numbers, is_hidden, exponents, table_of, codes)
    divisors, at = _tables_of(codes[:n], n_tables, out)
    states, first = np.full(_LANES, _LEAST, np.uint64), _U64(len(words))
    rest = _U64(n) - _U64(n) % _U64(_LANES)
    for back in range(_U64(n) - rest):  # what is decoded first is coded last
        i = _U64(n - 1 - back)
        lane = i - rest
        states[lane], first = _coded(states[lane], first, i, codes, numbers, divisors, words)
    # Lanes by themselves stay in registers, as in `decode`.
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    i = rest
    while i > _U64(0):
        i -= _U64(_LANES)
        x3, first = _coded(x3, first, i + _U64(3), codes, numbers, divisors, words)
        x2, first = _coded(x2, first, i + _U64(2), codes, numbers, divisors, words)
        x1, first = _coded(x1, first, i + _ONE, codes, numbers, divisors, words)
        x0, first = _coded(x0, first, i, codes, numbers, divisors, words)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    for state in states:
        at = _write(state, _STATE_NBYTES, out, at)
    nbytes = 4 * (len(words) - np.int64(first))
    out[at : at + nbytes] = words[first:].view(np.uint8)
    return int(at + nbytes)


@numba.njit(inline="always")
def _coded(
    state: Any, first: Any, i: Any, codes: Any, numbers: Any, divisors: Any, words: Any
) -> Any:
    """Code number `i` of a lane; its next state, and where the words begin."""
    code = _U64(codes[i])
    inverse, packed = divisors[code, 0], divisors[code, 1]
    most, value = divisors[code, 2], divisors[code, 3]
    n_raw = value >> _U64(40)
    raw = (_U64(numbers[i]) - value) & ((_ONE << n_raw) - _ONE)
    n_low = n_raw
    if _U64(numbers.dtype.type(-1)) > _U64(0xFFFF):  # known when it is compiled
        n_low = min(n_raw, _U64(_RAW))
        if n_raw > n_low:
            state, first = _pushed(state, _ONE << (_U64(63) - n_raw + n_low), words, first)
            state = (state << (n_raw - n_low)) | (raw >> n_low)
    state, first = _pushed(state, most, words, first)
    state = (state << n_low) | (raw & ((_ONE << n_low) - _ONE))
    # The quotient by the frequency; after Giesen, as a division takes as long as all the rest.
    quotient = _high(state, inverse) >> (packed >> _U64(48))  # type: ignore[call-arg]
    below = (packed >> _U64(12)) & _U64(0xFFFFF)
    return state + below + quotient * (_U64(_TOTAL) - (packed & _U64(0xFFF))), first


@cached_njit(nogil=True)
def decode(
    stream: U8Array,
    exponents: U8Array,
    slots: U64Array,
    words: U32Array,
    numbers: Numbers,
    is_hidden: U8Array,
) -> bool:
    """Fill `numbers` [n], and which of them are hidden and 0; False for what is no stream of n."""
    table_of = np.zeros(_EXPONENTS, np.uint32)
    at = _read_tables(stream, table_of, slots)
    n_words = (len(stream) - at - _LANES * _STATE_NBYTES) // 4
    if at < 0 or n_words < 0 or n_words > len(words):
        return False
    states = np.empty(_LANES, np.uint64)
    for lane in range(_LANES):
        states[lane] = _read(stream, at + _STATE_NBYTES * lane, _STATE_NBYTES)
    at += _LANES * _STATE_NBYTES
    if at + 4 * n_words != len(stream):
        return False
    words.view(np.uint8)[: 4 * n_words] = stream[at:]
    p, n = _U64(0), _U64(len(numbers))
    a, stop = _U64(0), n - n % _U64(_LANES)
    # Lanes by themselves stay in registers: a state that is stored each time takes a third longer.
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    while a < stop:
        b, c, d = a + _ONE, a + _U64(2), a + _U64(3)
        x0, p = _step(x0, p, a, table_of, exponents, slots, words, numbers, is_hidden)
        x1, p = _step(x1, p, b, table_of, exponents, slots, words, numbers, is_hidden)
        x2, p = _step(x2, p, c, table_of, exponents, slots, words, numbers, is_hidden)
        x3, p = _step(x3, p, d, table_of, exponents, slots, words, numbers, is_hidden)
        a += _U64(_LANES)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    for lane in range(n - stop):
        i = stop + _U64(lane)
        states[lane], p = _step(
            states[lane], p, i, table_of, exponents, slots, words, numbers, is_hidden
        )
    return bool(p == _U64(n_words) and (states == _LEAST).all())


@numba.njit(inline="always")
def _step(
    state: Any,
    p: Any,
    i: Any,
    table_of: Any,
    exponents: Any,
    slots: Any,
    words: Any,
    numbers: Any,
    is_hidden: Any,
) -> Any:
    """Decode number `i` of a lane; its next state, and the next word."""
    slot = slots[_U64(table_of[exponents[i]]) | (state & _MASK)]
    state = (slot & _U64(0x7FF)) * (state >> _N_BITS) + ((slot >> _U64(11)) & _MASK)
    n_raw = (slot >> _U64(21)) & _U64(31)
    if _U64(numbers.dtype.type(-1)) > _U64(0xFFFF):  # known when it is compiled
        low = min(n_raw, _U64(_RAW))
        raw = state & ((_ONE << low) - _ONE)
        state, p = _filled(state >> low, p, words)
        high = n_raw - low
        raw |= (state & ((_ONE << high) - _ONE)) << low
        state, p = _filled(state >> high, p, words)
    else:
        raw = state & ((_ONE << n_raw) - _ONE)
        state, p = _filled(state >> n_raw, p, words)
    numbers[i] = (slot >> _U64(27)) + raw
    is_hidden[i] = (slot >> _U64(26)) & _ONE
    return state, p


@numba.njit(inline="always")
def _filled(state: Any, p: Any, words: Any) -> Any:
    """A state with the next word if it is low; there is room for more words than numbers take."""
    is_low = _U64(state < _LEAST)  # no branch: it would be foreseen no better than the numbers
    word = _U64(words[p]) & (_U64(0) - is_low)
    return (state << (is_low << _U64(5))) | word, p + is_low


@numba.njit(inline="always")
def _pushed(state: Any, most: Any, words: Any, at: Any) -> Any:
    """A state below `most`, whose last word goes before place `at` if it is not."""
    is_full = state >= most
    words[at - _ONE] = np.uint32(state & _WORD)
    return state >> _HALF if is_full else state, at - _U64(is_full)


@numba.njit
def _own_tables(exponents: Any, table_of: Any, out: Any) -> Any:
    """Write which exponents have a table of their own, and number the tables; how many."""
    # In turn, since a counter that has just been written is slow to read.
    counts = np.zeros((4, _EXPONENTS), np.int64)
    for i in range(len(exponents)):
        counts[i & 3, exponents[i]] += 1
    n_own = 0
    for e in range(_EXPONENTS - 1):  # one less, so that their number fits a byte
        if counts[:, e].sum() >= _OWN:
            n_own += 1
            out[n_own] = e
            table_of[e] = n_own - 1
        else:
            table_of[e] = _EXPONENTS
    table_of[_EXPONENTS - 1] = _EXPONENTS
    for e in range(_EXPONENTS):
        table_of[e] = min(table_of[e], n_own)
    out[0] = n_own
    return n_own


@numba.njit
def _fill_codes(numbers: Any, is_hidden: Any, exponents: Any, table_of: Any, codes: Any) -> None:
    """Fill `codes` with the table and the symbol of each number."""
    is_wide = _U64(numbers.dtype.type(-1)) > _U64(0xFFFF)  # known when it is compiled
    for i in range(len(numbers)):
        # Of a larger number the exponent and the mantissa's first two bits; of 8 it is 8.
        if is_wide:
            symbol = np.uint32(np.float64(numbers[i]).view(np.uint64) >> _U64(50)) - np.uint32(4096)
        else:
            symbol = (np.float32(numbers[i]).view(np.uint32) >> np.uint32(21)) - np.uint32(512)
        symbol = symbol if numbers[i] >> _SMALL else np.uint32(numbers[i])
        codes[i] = np.uint32(_HIDDEN) if is_hidden[i] else symbol
    for i in range(len(numbers)):  # apart, as the other loop is vectorized
        codes[i] += table_of[exponents[i]] * np.uint16(_SYMBOLS)


@numba.njit
def _tables_of(codes: Any, n_tables: Any, out: Any) -> Any:
    """Write the tables; what divides by each code's frequency, and where the tables end.

    [codes, 4]: the inverse; frequency, that of all symbols before it in 12 bits on, and from bit
    48 on by how much a product with the inverse is shifted; what a state is below before it; the
    symbol's of `_VALUES`.
    """
    counts = np.zeros((4, n_tables * _SYMBOLS), np.int64)
    for i in range(len(codes)):
        counts[i & 3, codes[i]] += 1
    divisors = np.zeros((n_tables * _SYMBOLS, 4), np.uint64)
    frequencies, most = np.zeros((n_tables, _SYMBOLS), np.int64), np.zeros(n_tables, np.int64)
    for t in range(n_tables):
        first = t * _SYMBOLS
        of_table = counts[:, first : first + _SYMBOLS].sum(axis=0)  # [symbols]
        most[t], below = _normalise(of_table, frequencies[t]), 0
        for s in range(_SYMBOLS):
            frequency = frequencies[t, s]
            if not frequency:
                continue
            shift = _length(frequency - 1)
            inverse, offset = _U64(0) - _ONE, below + _TOTAL - 1  # a product with it is one less
            if frequency > 1:
                inverse, offset = _inverse(frequency, shift), below
            packed = frequency | offset << 12 | max(0, shift - 1) << 48
            n_low = min(_VALUES[s] >> _U64(40), _U64(_RAW))
            most_state = _U64(frequency) << (_U64(63) - n_low - _N_BITS)
            divisor = divisors[first + s]
            divisor[0], divisor[1], divisor[2], divisor[3] = inverse, packed, most_state, _VALUES[s]
            below += frequency
    return divisors, _write_tables(frequencies, most, n_tables, out)


@numba.njit
def _inverse(frequency: Any, shift: Any) -> Any:
    """2^(63 + shift) over the frequency, rounded up: of 64 bits, by long division."""
    dividend, f = _ONE << _U64(31 + shift), _U64(frequency)
    high = dividend // f
    rest = (dividend - high * f) << _HALF
    return (high << _HALF) + (rest + f - _ONE) // f


@numba.njit
def _normalise(counts: Any, frequencies: Any) -> Any:
    """Fill in frequencies [symbols] that add up to _TOTAL; the symbol that gets what is left.

    None is 0 whose count is not. All but that symbol's have their first _KEPT bits alone.
    """
    total, most, left = counts.sum(), counts.argmax(), _TOTAL
    if total == 0:
        return most
    for s in range(_SYMBOLS):
        if counts[s] and s != most:
            frequency = max(1, counts[s] * _TOTAL // total)
            shift = max(0, _length(frequency) - _KEPT)
            frequencies[s] = frequency >> shift << shift
            left -= frequencies[s]
    while left < 1:  # many symbols are rounded up to 1
        s = frequencies.argmax()
        left += frequencies[s] - (frequencies[s] >> 1)
        frequencies[s] >>= 1
    frequencies[most] = left
    return most


@numba.njit
def _write_tables(frequencies: Any, mosts: Any, at: Any, out: Any) -> Any:
    """Write tables [tables, symbols] from byte `at` on; where they end."""
    at_bit = 8 * at
    for t in range(len(frequencies)):
        of = frequencies[t]
        n_symbols, most, last = 0, mosts[t], 0
        for s in range(_SYMBOLS):
            n_symbols = s + 1 if of[s] else n_symbols
        at_bit = _put(n_symbols, 8, out, at_bit)
        if n_symbols:
            at_bit = _put(most, 7, out, at_bit)
        for s in range(n_symbols):
            if s == most:
                continue
            size = _length(of[s])
            change = 2 * (size - last) if size >= last else 2 * (last - size) - 1
            for _ in range(change >> 1):
                at_bit = _put(1, 1, out, at_bit)
            at_bit = _put((change & 1) << 1, 2, out, at_bit)
            low = min(max(size - 1, 0), _KEPT - 1)
            at_bit = _put((of[s] >> max(0, size - _KEPT)) & ((1 << low) - 1), low, out, at_bit)
            last = size
    return -(-at_bit // 8)


@numba.njit
def _read_tables(stream: Any, table_of: Any, slots: Any) -> Any:
    """Fill in where each exponent's table begins, and the tables; where they end, −1 for no sense.

    A slot is its symbol's frequency, its place among the symbol's slots (from bit 11 on), how many
    bits follow (21), whether the number is hidden (26), and the least number of the symbol (27).
    """
    if len(stream) < 1 or len(stream) < 1 + stream[0]:
        return -1
    n_own = np.int64(stream[0])
    table_of[:] = n_own << _BITS
    for t in range(n_own):
        table_of[stream[1 + t]] = t << _BITS
    at_bit, frequencies = 8 * (1 + n_own), np.empty(_SYMBOLS, np.int64)
    for t in range(n_own + 1):
        at_bit = _read_table(stream, at_bit, frequencies)
        if at_bit < 0:
            return -1
        at = t << _BITS
        for s in range(_SYMBOLS):
            n_raw, value = _VALUES[s] >> _U64(40), _VALUES[s] & _WORD
            slot = _U64(frequencies[s]) | n_raw << _U64(21) | value << _U64(27)
            slot |= _U64(s == _HIDDEN) << _U64(26)
            for j in range(frequencies[s]):
                slots[at + j] = slot | _U64(j) << _U64(11)
            at += frequencies[s]
        slots[at : (t + 1) << _BITS] = 0  # a table of no symbols
    return -(-at_bit // 8)


@numba.njit
def _read_table(stream: Any, at_bit: Any, frequencies: Any) -> Any:
    """Fill `frequencies` [_SYMBOLS]; where the table ends, −1 for no sense."""
    frequencies[:] = 0
    n_symbols, at_bit = _take(stream, at_bit, 8)
    if n_symbols == 0 or at_bit < 0:
        return at_bit
    most, at_bit = _take(stream, at_bit, 7)
    last, left = 0, _TOTAL
    for s in range(min(n_symbols, _SYMBOLS)):
        if s == most:
            continue
        bit, change = 1, -2
        while bit == 1 and at_bit >= 0:
            bit, at_bit = _take(stream, at_bit, 1)
            change += 2
        odd, at_bit = _take(stream, at_bit, 1)
        size = last - (change + 2) // 2 if odd else last + change // 2
        if at_bit < 0 or size < 0 or size > _BITS:
            return -1
        low = min(max(size - 1, 0), _KEPT - 1)
        bits, at_bit = _take(stream, at_bit, low)
        frequencies[s] = (1 << low | bits) << max(0, size - _KEPT) if size else 0
        left -= frequencies[s]
        last = size
    if at_bit < 0 or left <= 0 or n_symbols > _SYMBOLS:
        return -1
    frequencies[most] = left
    return at_bit


@numba.njit
def _put(number: Any, n: Any, out: Any, at_bit: Any) -> Any:
    """Write `n` bits from `at_bit` on, the lowest first; where they end."""
    for i in range(n):
        at = at_bit + i
        if at & 7 == 0:
            out[at >> 3] = 0
        out[at >> 3] |= ((number >> i) & 1) << (at & 7)
    return at_bit + n


@numba.njit
def _take(stream: Any, at_bit: Any, n: Any) -> Any:
    """The number in `n` bits from `at_bit` on, and where they end: −1 behind the stream."""
    if at_bit < 0 or at_bit + n > 8 * len(stream):
        return 0, -1
    found = 0
    for i in range(n):
        at = at_bit + i
        found |= int((stream[at >> 3] >> (at & 7)) & 1) << i
    return found, at_bit + n


@numba.njit
def _length(number: Any) -> Any:
    n = 0
    while number >> n:
        n += 1
    return n


@numba.njit
def _write(number: Any, nbytes: Any, out: Any, at: Any) -> Any:
    """Write a little-endian number at byte `at`; where it ends."""
    for i in range(nbytes):
        out[at + i] = (number >> _U64(8 * i)) & _U64(255)
    return at + nbytes


@numba.njit
def _read(stream: Any, at: Any, nbytes: Any) -> Any:
    number = _U64(0)
    for i in range(nbytes):
        number |= _U64(stream[at + i]) << _U64(8 * i)
    return number
