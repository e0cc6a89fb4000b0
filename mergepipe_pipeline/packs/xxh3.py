"""XXH3 of many frames in one compiled call, which lets other threads go on meanwhile.

The library takes one buffer a call and holds the interpreter's lock: of a merge of 20 experts that
is 700,000 calls. It follows the specification (xxHash, doc/xxhash_spec.md), with its seed 0 and its
secret, for frames longer than 240 bytes; shorter ones are rare, and the library hashes them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.extending import intrinsic

from mergepipe_pipeline.arrays import I64Array, U8Array
from mergepipe_pipeline.jit import cached_njit

Hashes = npt.NDArray[np.uint64]

#: XXH3 hashes inputs up to this length in another way, which is not here.
SHORT_NBYTES = 240
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1 = np.uint64(0x9E3779B1)
_PRIME64_1 = np.uint64(0x9E3779B185EBCA87)
_AVALANCHE = np.uint64(0x165667919E3779F9)
_START = np.array(
    [
        0xC2B2AE3D,
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x85EBCA77,
        0x27D4EB2F165667C5,
        0x9E3779B1,
    ],
    np.uint64,
)
_STRIPE_NBYTES, _LANES, _STRIPES = 64, 8, 16


def _keys(at: int, n: int) -> Hashes:
    """`n` numbers of the secret from byte `at` on."""
    return np.frombuffer(_SECRET[at : at + 8 * n], "<u8").astype(np.uint64)


#: The keys of each stripe of a block, of its end, of the last stripe, and of the lanes' sum.
_STRIPE_KEYS = np.concatenate([_keys(8 * stripe, _LANES) for stripe in range(_STRIPES)])
_BLOCK_KEYS, _LAST_KEYS, _SUM_KEYS = _keys(128, _LANES), _keys(121, _LANES), _keys(11, _LANES)


@cached_njit(nogil=True)
def are_equal(
    raw: U8Array, starts: I64Array, nbytes: I64Array, expected: Hashes, first: int
) -> bool:
    """Whether all frames but short ones have the XXH3 that is expected.

    `starts` and `nbytes` are [tiers, chunks], of frames in `raw`; 0 bytes for none. `expected` is
    [tiers, all chunks], of which `first` is the first here.
    """
    for tier in range(starts.shape[0]):
        for chunk in range(starts.shape[1]):
            start, n = starts[tier, chunk], nbytes[tier, chunk]
            if n > SHORT_NBYTES and _hash(raw, start, n) != expected[tier, first + chunk]:
                return False
    return True


@numba.njit
def _hash(raw: Any, start: Any, n: Any) -> Any:
    """XXH3 of the n bytes from `start` on, more than SHORT_NBYTES."""
    # Both parts of a lane's sum are added up by themselves until a block ends.
    lanes, sums, products = _START.copy(), np.zeros(_LANES, np.uint64), np.zeros(_LANES, np.uint64)
    address = np.uint64(raw.ctypes.data) + np.uint64(start)
    n_stripes = (n - 1) // _STRIPE_NBYTES
    for stripe in range(n_stripes):
        at = address + np.uint64(stripe * _STRIPE_NBYTES)
        key = (stripe % _STRIPES) * _LANES
        _add_stripe(at, _STRIPE_KEYS, np.uint64(key), sums, products)
        if stripe % _STRIPES == _STRIPES - 1:
            _gather(lanes, sums, products)
            for i in range(_LANES):
                mixed = lanes[i] ^ (lanes[i] >> np.uint64(47)) ^ _BLOCK_KEYS[i]
                lanes[i] = mixed * _PRIME32_1
    last = address + np.uint64(n - _STRIPE_NBYTES)
    _add_stripe(last, _LAST_KEYS, np.uint64(0), sums, products)
    _gather(lanes, sums, products)
    digest = np.uint64(n) * _PRIME64_1
    for i in range(0, _LANES, 2):
        digest += _folded(lanes[i] ^ _SUM_KEYS[i], lanes[i + 1] ^ _SUM_KEYS[i + 1])
    digest = (digest ^ (digest >> np.uint64(37))) * _AVALANCHE
    return digest ^ (digest >> np.uint64(32))


@numba.njit(inline="always")
def _add_stripe(address: Any, keys: Any, key: Any, sums: Any, products: Any) -> Any:
    for i in range(_LANES):
        word: Any = _word_at(address + np.uint64(8 * i))  # type: ignore[call-arg]
        keyed = word ^ keys[key + np.uint64(i)]
        sums[i] += word
        products[i] += (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))


@numba.njit(inline="always")
def _gather(lanes: Any, sums: Any, products: Any) -> Any:
    """Add both parts to the lanes: words go to their neighbour's."""
    for i in range(_LANES):
        lanes[i] += products[i] + sums[i ^ 1]
    for i in range(_LANES):
        sums[i] = products[i] = 0


@numba.njit(inline="always")
def _folded(a: Any, b: Any) -> Any:
    """The halves of a product of 128 bits, xor-ed."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    lowest, highest = a_low * b_low, a_high * b_high
    cross = (lowest >> half) + (a_high * b_low & low) + a_low * b_high
    upper = (a_high * b_low >> half) + (cross >> half) + highest
    return upper ^ ((cross << half) | (lowest & low))


@intrinsic
def _word_at(context: Any, address: Any) -> Any:
    """Eight bytes at an address, as a number."""
    word = numba.uint64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_value_type(word)
        loaded = builder.load(builder.inttoptr(arguments[0], kind.as_pointer()))
        loaded.align = 1
        return loaded

    return word(numba.uint64), generate
