"""The numbers of `steps.random` inside compiled loops.

Kernels fill a few thousand numbers at a time, which stay in the first cache, and use them in the
loop that needs them.
"""

from __future__ import annotations

import numba
import numpy as np

from mergepipe_pipeline.arrays import U32Array
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.operators.kernels import splitmix
from mergepipe_pipeline.operators.kernels.splitmix import GAMMA

mixed = numba.njit(inline="always")(splitmix.mixed)


@cached_njit(nogil=True)
def fill_uniforms(key: np.uint64, start_elem: int, out: U32Array) -> None:
    """Write the numbers of elements [start_elem, start_elem + n) to `out`, uint32 [n].

    `key` is of `steps.random.stream_key`; the numbers are those of `steps.random.uniforms`.
    """
    n = len(out)
    state = key + np.uint64(start_elem // 2 + 1) * GAMMA
    skip = min(start_elem % 2, n)
    if skip:
        out[0] = np.uint32(mixed(state) >> np.uint64(32))
        state += GAMMA
    rest = out[skip:]
    for i in range(len(rest) // 2):
        word = mixed(state)
        rest[2 * i] = np.uint32(word)
        rest[2 * i + 1] = np.uint32(word >> np.uint64(32))
        state += GAMMA  # not i · GAMMA: products of 64 bits are most of the work
    if len(rest) % 2:
        rest[-1] = np.uint32(mixed(state))
