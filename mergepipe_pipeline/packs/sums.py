"""Sizes and residuals of chunks, added up for longer blocks.

A pack stores sums of SUMMED_CHUNKS chunks beside those of chunks: plans of large merges need
nothing finer, and read a sixteenth. Longer blocks are sums of these, whether a pack stores them or
not, so that a plan does not depend on it.
"""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.arrays import F32Array, U32Array
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS

#: Chunks of the sums that a pack keeps, and their elements: 1 Mi.
SUMMED_CHUNKS = 16
SUMMED_ELEMS = SUMMED_CHUNKS * CHUNK_ELEMS

Sizes = U32Array
Residuals = F32Array


def summed(nbytes: Sizes, residual_sq: Residuals, n: int) -> tuple[Sizes, Residuals]:
    """`nbytes` [tiers, columns] and `residual_sq` [levels, columns] of each n columns.

    The last may be fewer.
    """
    if n == 1:
        return nbytes, residual_sq
    starts = np.arange(0, nbytes.shape[1], n)
    exactly = np.add.reduceat(residual_sq, starts, axis=1, dtype=np.float64)
    # To float32, and up: the bound has to hold.
    rounded = np.nextafter(exactly.astype(np.float32), np.float32(np.inf))
    total = np.add.reduceat(nbytes, starts, axis=1, dtype=np.uint32)
    return total, np.where(exactly > 0, rounded, np.float32(0))
