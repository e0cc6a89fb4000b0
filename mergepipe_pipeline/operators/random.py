"""The one home of random numbers in a merge: numbered, never drawn in order.

Element e of a tensor owns the 32-bit uniform number e of a Philox stream; the stream belongs to
(seed, expert position, tensor name). So any slice can be had by itself, and block sizes, threads
and retries change nothing. `sparsify` drops with it, `analysis` sums what is kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.digest import digest_json

#: One step of the Philox counter gives four 64-bit words.
_PER_STEP = 8


def uniforms(
    seed: int, position: int, tensor: str, start_elem: int, n: int
) -> npt.NDArray[np.uint32]:
    """The numbers of elements [start_elem, start_elem + n), uniform over all 32-bit ones.

    Uint32 [n]. `position` is the expert's place in the recipe.
    Source: Philox4x64-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    key = int(digest_json(["keep_mask", seed, position, tensor])[:32], 16)
    first, skip = divmod(start_elem, _PER_STEP)
    stream = np.random.Philox(key=key, counter=first)
    words = stream.random_raw((skip + n + 1) // 2).astype("<u8", copy=False)
    return words.view("<u4")[skip : skip + n]


def keep_mask(
    seed: int, position: int, tensor: str, start_elem: int, n: int, density: float
) -> npt.NDArray[np.bool_]:
    """Which of elements [start_elem, start_elem + n) are kept, each with probability `density`.

    Bool [n]. Density 0 keeps none and 1 keeps all; between, an element is kept iff its number is
    below round(density · 2**32).
    """
    threshold = round(density * 2**32)
    if threshold <= 0 or threshold >= 2**32:
        return np.full(n, threshold > 0)
    return uniforms(seed, position, tensor, start_elem, n) < np.uint32(threshold)
