"""Passes over matrices of cosines, compiled: NumPy would write each step of them to memory.

`cosine` is float32 [blocks, E, E]; `there` [blocks, E] says which deltas are not zero.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.spec.stats import SKETCH_WIDTH

Floats = npt.NDArray[np.float64]
Halves = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


@numba.njit(nogil=True, cache=True)
def straighten(cosine: Halves) -> None:
    """Undo the bias of sketches' cosines, in place, and set the diagonal to 1.

    A cosine of few numbers is too near zero on average (Olkin and Pratt 1958).
    """
    blocks, count, _ = cosine.shape
    half = np.float32(0.5 / SKETCH_WIDTH)
    one = np.float32(1)
    for b in range(blocks):
        for i in range(count):
            for j in range(count):
                c = cosine[b, i, j]
                c *= one + (one - c * c) * half
                cosine[b, i, j] = min(max(c, -one), one)
            cosine[b, i, i] = one


@numba.njit(nogil=True, cache=True)
def add_spread(cosine: Halves, there: Flags, whole: Halves, spread: Floats) -> None:
    """Add to `spread` [E, E] the squares by which blocks differ from `whole` [E, E]."""
    blocks, count, _ = cosine.shape
    for b in range(blocks):
        for i in range(count):
            if there[b, i]:
                for j in range(count):
                    off = cosine[b, i, j] - whole[i, j]
                    spread[i, j] += off * off if there[b, j] else np.float32(0)


@numba.njit(nogil=True, cache=True)
def shrink(cosine: Halves, there: Flags, whole: Halves, own: Halves, centre: Halves) -> None:
    """Keep the part `own` [E, E] of what blocks differ by from `whole`, around `centre`; in place.

    The diagonal stays 1, and what is zero has cosine 0 with all others.
    """
    blocks, count, _ = cosine.shape
    for b in range(blocks):
        for i in range(count):
            for j in range(count):
                c = (cosine[b, i, j] - whole[i, j]) * own[i, j] + centre[i, j]
                cosine[b, i, j] = c if there[b, i] and there[b, j] else np.float32(0)
            cosine[b, i, i] = np.float32(1)


@numba.njit(nogil=True, cache=True)
def quadratic(cosine: Halves, size: Floats, value: Floats, variance: Floats) -> None:
    """Per block Σᵢⱼ sizeᵢ sizeⱼ cosineᵢⱼ and the variance that sketches give it.

    `size` [blocks, E] is 0 for what takes no part; fills `value` and `variance` [blocks]. By the
    delta method: a sketch's entries are normal with the deltas' covariance, and norms are known, so
    what errs is Σᵢⱼ sizeᵢ sizeⱼ xᵢxⱼ − Σᵢ (sizeᵢ pullᵢ) xᵢ², with x of unit variances.
    """
    blocks, count = size.shape
    weight = np.zeros(count)
    for b in range(blocks):
        total, bent = 0.0, 0.0
        for i in range(count):
            pull = 0.0
            if size[b, i] != 0:
                for j in range(count):
                    pull += cosine[b, i, j] * size[b, j]
            weight[i] = size[b, i] * pull
            total += weight[i]
            bent += weight[i] * pull * pull
        shared = 0.0
        for i in range(count):
            if weight[i] != 0:
                row = 0.0
                for j in range(count):
                    row += cosine[b, i, j] * cosine[b, i, j] * weight[j]
                shared += weight[i] * row
        value[b] = total
        variance[b] = max(total * total - 2 * bent + shared, 0.0) * (2.0 / SKETCH_WIDTH)
