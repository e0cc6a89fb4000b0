"""The one home of random numbers in a merge: numbered, never drawn in order.

Element e of a tensor owns the 32-bit uniform number e of a stream; the stream belongs to (seed,
expert position, tensor name). So any slice can be computed by itself, and block sizes, threads and
retries change nothing. Stream k is the SplitMix64 generator seeded with k, whose state after w
steps is k + w · GAMMA; word w is numbers 2w (its low half) and 2w + 1. `kernels.uniforms` makes
the same numbers inside compiled loops; this file needs NumPy alone, and is what it is tested
against.

Measured in cache, ns per element: compiled 0.13 (AVX-512) or 0.38 (AVX2, which has no 64-bit
multiplication), here 1.6, NumPy's Philox4x64 2.4. Mixing 32-bit words gains nothing: it takes two
rounds to mix in a key and costs 0.23 or 0.27.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import BoolArray, U32Array
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.operators.kernels.splitmix import GAMMA, mixed


def stream_key(seed: int, position: int, tensor: str) -> np.uint64:
    """The key of an expert's stream for a tensor. `position` is its place in the recipe."""
    return np.uint64(int(digest_json(["keep_mask", seed, position, tensor])[:16], 16))


def uniforms(seed: int, position: int, tensor: str, start_elem: int, n: int) -> U32Array:
    """The numbers of elements [start_elem, start_elem + n), uniform over all 32-bit ones.

    Uint32 [n].
    """
    first, skip = divmod(start_elem, 2)
    steps = np.arange(first + 1, first + 1 + (skip + n + 1) // 2, dtype=np.uint64)
    words: npt.NDArray[np.uint64] = mixed(stream_key(seed, position, tensor) + steps * GAMMA)
    return words.astype("<u8", copy=False).view("<u4")[skip : skip + n]


def keep_below(density: float) -> int:
    """Elements with numbers below this are kept: in [0, 2**32], for any density."""
    return min(max(round(density * 2**32), 0), 2**32)


def keep_mask(
    seed: int, position: int, tensor: str, start_elem: int, n: int, density: float
) -> BoolArray:
    """Which of elements [start_elem, start_elem + n) are kept, each with probability `density`.

    Bool [n]. Density 0 keeps none and 1 keeps all; between, `keep_below` says which.
    """
    limit = keep_below(density)
    if limit in (0, 2**32):
        return np.full(n, limit > 0)
    return uniforms(seed, position, tensor, start_elem, n) < np.uint32(limit)
