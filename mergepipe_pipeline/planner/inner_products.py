"""Inner products of experts' deltas, block by block, from sketches: no weight is read.

Norms are exact; a cosine is that of two sketches, with a standard error of (1 − cos²)/√width. To
choose by them, blocks of a tensor that do not differ by more than that share the tensor's cosine:
it is the same figure, known better. A few blocks' matrices are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, F32Array, F64Array, U16Array
from mergepipe_pipeline.domain.stats import SKETCH_WIDTH, widened

#: Blocks of one batch, and its cosines.
Batch = tuple[slice, F32Array]
#: Cosines of one batch: few enough to stay in the cache from one pass to the next.
_BATCH_ELEMS = 1 << 18
#: Blocks, evenly spread, that show by how much a tensor's blocks differ.
_SPREAD_BLOCKS = 64
#: Standard errors that a cosine must stand out by before a choice relies on it.
_CAUTION = 3
_TINY = np.finfo(np.float32).tiny


class Gram:
    """Cosines [blocks, E, E] of the deltas of E experts of one tensor, with a unit diagonal.

    `sketches` [blocksᵢ, width]; an expert with fewer blocks than another is zero beyond them, and
    what is zero has cosine 0 with all others.
    """

    def __init__(self, sketches: Sequence[U16Array]) -> None:
        blocks, count = max(map(len, sketches)), len(sketches)
        table = np.zeros((blocks, count, SKETCH_WIDTH), np.float32)
        for i, sketch in enumerate(sketches):
            table[: len(sketch), i] = widened(sketch)
        squares = np.einsum("bek,bek->be", table, table)
        if not np.isfinite(squares).all():
            np.nan_to_num(table, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
            squares = np.einsum("bek,bek->be", table, table)
            if not np.isfinite(squares).all():  # of finite numbers that are large
                squares = np.einsum("bek,bek->be", table, table, dtype=np.float64)
        self._norms = np.maximum(np.sqrt(squares), _TINY)
        table /= self._norms[:, :, None]
        self._table = table

    def plain(self, every: int = 1) -> Iterator[Batch]:
        """As likely too large as too small, and erring independently: to add them up.

        Of each `every`th block.
        """
        from mergepipe_pipeline.planner.compiled import straighten

        blocks, count, _ = self._table.shape
        step = every * max(1, _BATCH_ELEMS // (count * count))
        for start in range(0, blocks, step):
            batch = slice(start, start + step, every)
            part = self._table[batch]
            cosine: F32Array = np.matmul(part, part.transpose(0, 2, 1))
            straighten(cosine)
            yield batch, cosine

    def cautious(self) -> Iterator[Batch]:
        """Without what chance could have made: to choose by them without chasing noise."""
        from mergepipe_pipeline.planner.compiled import shrink

        there = self._norms > _TINY
        whole, centre, own = self._shrinkage(there)
        if own.any():
            for batch, cosine in self.plain():
                shrink(cosine, there[batch], whole, own, centre)
                yield batch, cosine
            return
        np.fill_diagonal(centre, 1)
        yield slice(0, len(there)), np.broadcast_to(centre, (len(there), *centre.shape))

    def _shrinkage(self, there: BoolArray) -> tuple[F32Array, F32Array, F32Array]:
        """The tensor's cosine, what chance leaves of it, and what it leaves of a block's own."""
        from mergepipe_pipeline.planner.compiled import add_spread

        norms = self._norms.astype(np.float64)
        weight = np.maximum(norms.T @ norms, _TINY)
        scaled = (self._table * self._norms[:, :, None]).transpose(1, 0, 2)
        scaled = scaled.reshape(len(weight), -1)
        whole = np.clip(scaled @ scaled.T / weight, -1, 1).astype(np.float32)
        noise = np.square(1 - np.square(whole)) / SKETCH_WIDTH
        # The error of Σ_b ‖a_b‖‖b_b‖cos_b over its blocks, as a cosine.
        error = noise * (np.square(norms).T @ np.square(norms)) / np.square(weight)
        centre = whole * _part_of(np.square(whole), _CAUTION**2 * error)
        # By how much sketches of one cosine differ by chance, and by how much these differ.
        every = -(-len(there) // _SPREAD_BLOCKS)
        present = there[::every].astype(np.float32)
        degrees = np.maximum(present.T @ present - 1, 1)
        noise *= 1 + _CAUTION * np.sqrt(2 / degrees)
        spread = np.zeros(whole.shape, np.float64)
        for batch, cosine in self.plain(every):
            add_spread(cosine, there[batch], whole, spread)
        return whole, centre, _part_of(spread / degrees, noise)


def _part_of(square: F32Array | F64Array, chance: F32Array | F64Array) -> F32Array:
    """How much of a square is more than chance explains, in [0, 1]."""
    part = np.clip(1 - chance / np.maximum(square, _TINY), 0, 1)
    return part.astype(np.float32)
