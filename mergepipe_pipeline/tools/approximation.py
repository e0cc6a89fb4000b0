"""Rows for tokens that a model lacks: sums of rows of shared tokens, found in another's space.

*nearest*: the k nearest shared tokens, weighted by one over their distance (mergekit's
`common_interpolation`). *omp*: orthogonal matching pursuit (Pati et al., 1993; for tokenizers,
arXiv:2506.06607): k times the shared token with the largest product with what is left is taken,
and all coefficients are solved again. A batch of tokens at a time, float64 within it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from mergepipe_pipeline.arrays import F32Array, F64Array, I64Array
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.progress import Advance

#: Tokens at once: with 64 coefficients of 4096 elements, 134 MB in float64.
_BATCH = 64
#: An atom of which less than this share is new is one that the others give already.
_DEPENDENT = 1e-6


@dataclass(frozen=True, slots=True)
class Combination:
    """For each of n tokens k shared ones, by their place among the shared, with coefficients.

    `residual` is ‖token − sum‖ / ‖token‖ in the donor's space.
    """

    places: I64Array
    coefficients: F64Array
    residual: F64Array

    def of(self, rows: F32Array) -> F64Array:
        """The sums over other rows of the shared tokens: [n, ...]."""
        picked = rows[self.places].astype(np.float64)
        sums: F64Array = np.einsum("nk,nk...->n...", self.coefficients, picked)
        return sums


def combine(
    tokens: F32Array, shared: F32Array, method: str, k: int, advance: Advance
) -> Combination:
    """Each of `tokens` [n, d] as a sum of at most k of `shared` [m, d]; advances by tokens."""
    k = min(k, len(shared), shared.shape[1] if method == "omp" else k)
    approximate: Callable[[F32Array], tuple[I64Array, F64Array]]
    approximate = _Pursuit(shared, k) if method == "omp" else _Nearest(shared, k)
    parts: list[tuple[I64Array, F64Array]] = []
    batches = [tokens[i : i + _BATCH] for i in range(0, len(tokens), _BATCH)]
    # Threads inside a product would change its last bits with their number.
    with threadpool_limits(1, "blas"), Workers(threads.cores()) as workers:
        for batch, part in zip(
            batches, workers.map(approximate, batches, depth=threads.cores() + 1), strict=True
        ):
            parts.append(part)
            advance(len(batch))
    empty = np.zeros((0, k))
    places = np.concatenate([p for p, _ in parts] or [empty.astype(np.int64)])
    coefficients = np.concatenate([c for _, c in parts] or [empty])
    combination = Combination(places, coefficients, np.zeros(len(places)))
    norms = np.linalg.norm(tokens.astype(np.float64), axis=1)
    residual = np.linalg.norm(tokens - combination.of(shared), axis=1)
    return Combination(places, coefficients, residual / np.where(norms > 0, norms, 1.0))


class _Nearest:
    def __init__(self, shared: F32Array, k: int) -> None:
        self._shared, self._k = shared, k
        self._squares = np.square(shared, dtype=np.float64).sum(axis=1)

    def __call__(self, tokens: F32Array) -> tuple[I64Array, F64Array]:
        # What all candidates of a token have in common does not change their order.
        far = self._squares - 2.0 * (tokens @ self._shared.T)
        wide = min(2 * self._k, far.shape[1])  # a few more, since products are rounded
        places = np.argpartition(far, wide - 1, axis=1)[:, :wide].astype(np.int64)
        places.sort(axis=1)
        apart = tokens[:, None].astype(np.float64) - self._shared[places]
        distances = np.linalg.norm(apart, axis=2)
        order = np.argsort(distances, axis=1, kind="stable")[:, : self._k]
        places = np.take_along_axis(places, order, axis=1)
        distances = np.take_along_axis(distances, order, axis=1)
        is_same = distances == 0
        weights = np.where(is_same, 1.0, 0.0)
        plain = ~is_same.any(axis=1)
        weights[plain] = 1.0 / distances[plain]
        return places, weights / weights.sum(axis=1, keepdims=True)


class _Pursuit:
    def __init__(self, shared: F32Array, k: int) -> None:
        self._shared, self._k = shared, k

    def __call__(self, tokens: F32Array) -> tuple[I64Array, F64Array]:
        """An orthonormal basis of what was taken grows by one a step; a triangle remembers how."""
        n, (k, d) = len(tokens), (self._k, self._shared.shape[1])
        residual = tokens.astype(np.float64)
        basis, triangle = np.zeros((n, k, d)), np.zeros((n, k, k))
        along = np.zeros((n, k))
        places = np.zeros((n, k), np.int64)
        rows = np.arange(n)
        for step in range(k):
            scores = np.abs(residual.astype(np.float32) @ self._shared.T)
            scores[rows[:, None], places[:, :step]] = -1.0
            places[:, step] = chosen = scores.argmax(axis=1)
            atom = self._shared[chosen].astype(np.float64)
            size, new = np.linalg.norm(atom, axis=1), atom
            for _ in range(2):  # once more for what rounding has left
                parts = np.einsum("nkd,nd->nk", basis[:, :step], new)
                new = new - np.einsum("nk,nkd->nd", parts, basis[:, :step])
                triangle[:, :step, step] += parts
            norm = np.linalg.norm(new, axis=1)
            is_new = norm > _DEPENDENT * size
            basis[:, step] = np.where(
                is_new[:, None], new / np.where(is_new, norm, 1.0)[:, None], 0
            )
            triangle[:, step, step] = np.where(is_new, norm, 1.0)
            along[:, step] = np.einsum("nd,nd->n", basis[:, step], residual)
            residual -= along[:, step, None] * basis[:, step]
        solved = np.linalg.solve(triangle, along[..., None])[..., 0]
        return places, solved.astype(np.float64)
