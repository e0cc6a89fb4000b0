"""The leading directions of a tensor's deltas: the matrices of low rank that are nearest to them.

A subspace iteration on δᵀδ, which takes δ a few rows at a time and holds little beside them.
Source: Halko, Martinsson, Tropp, "Finding structure with randomness" (arXiv:0909.4061).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F32Array, F64Array

#: Directions that are iterated beside those that are asked for: they take up what comes after.
_BESIDE = 8
_ITERATIONS = 2
_ROWS_NBYTES = 4 << 20

#: Rows [first, stop) of δ, float32 [stop − first, columns].
ReadRows = Callable[[int, int], F32Array]


class Directions(NamedTuple):
    """Factors of a matrix near to δ: `left` [rows, r] and `right` [r, columns], the longest first.

    The rows of `right` are orthonormal, so that squares of `left` add up to what is explained.
    """

    left: F32Array
    right: F32Array

    @property
    def sq_norms(self) -> F64Array:
        """[r]: the part of ‖δ‖² that each direction explains."""
        squares: F64Array = np.square(self.left, dtype=np.float64).sum(axis=0)
        return squares


def leading(rows: ReadRows, shape: tuple[int, int], rank: int) -> Directions:
    """The `rank` leading directions of δ of this shape; δ is read thrice.

    The same on one machine, however many threads do this side by side.
    """
    n_rows, n_cols = shape
    width = min(rank + _BESIDE, n_rows, n_cols)
    at_once = max(1, _ROWS_NBYTES // (4 * n_cols))
    windows = [(first, min(n_rows, first + at_once)) for first in range(0, n_rows, at_once)]
    basis = np.random.default_rng(0).standard_normal((n_cols, width), np.float32)
    for _ in range(_ITERATIONS):
        basis = _orthonormal(basis)
        image = np.zeros_like(basis)  # δᵀδ · basis [columns, width]
        for window in windows:
            delta = rows(*window)
            image += delta.T @ (delta @ basis)
        basis = image
    basis = _orthonormal(basis)
    image = np.concatenate([rows(*window) @ basis for window in windows])  # [rows, width]
    gram = image.T.astype(np.float64) @ image
    turn = np.linalg.eigh(gram)[1][:, ::-1][:, :rank].astype(np.float32)
    return Directions(image @ turn, np.ascontiguousarray((basis @ turn).T))


def _orthonormal(columns: npt.NDArray[np.float32]) -> F32Array:
    orthonormal: F32Array = np.linalg.qr(columns)[0]
    return orthonormal
