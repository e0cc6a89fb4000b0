"""What approximating deltas makes of a merge, tried on samples: each is quantised as a pack is.

For sums of deltas the norms of residuals are known exactly; samples only tell how residuals of
different experts add up. Other merges are tried with and without what is approximated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import BoolArray, F64Array
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.pack import NOT_READ, TIERS
from mergepipe_pipeline.domain.stats import SAMPLE_WIDTH, TensorStats, widened
from mergepipe_pipeline.planner.candidates import Row
from mergepipe_pipeline.planner.levels import Levels
from mergepipe_pipeline.planner.packed_rows import NO_LEVELS
from mergepipe_pipeline.planner.simulation import PARTS, Samples, Simulate

_X = TIERS.index("X")
#: Sampled elements of one tensor and all its experts that are tried at most.
_MAX_ELEMS = 1 << 18


class LevelSamples:
    """The samples of one output tensor's experts, on the grid `sampled` of their statistics.

    `rows` are on `grid`, whose blocks are as long or longer. `simulate` None: a sum of deltas.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        stats: Sequence[TensorStats],
        grid: BlockGrid,
        sampled: BlockGrid,
        simulate: Simulate | None,
    ) -> None:
        self._rows, self._stats, self._simulate = rows, stats, simulate
        numel, elems = max(r.numel for r in rows), sampled.block_elems
        n_blocks = sampled.count(numel)
        # Evenly spread blocks, so many that all experts' samples stay small.
        step = -(-n_blocks // max(1, _MAX_ELEMS // (SAMPLE_WIDTH * len(rows))))
        self._blocks = np.arange(0, n_blocks, step)
        self._out_blocks = self._blocks * elems // grid.block_elems
        lengths = np.minimum(elems, numel - elems * self._blocks).astype(np.float64)
        of = [row.levels for row in rows]
        self._units = np.array([o.packed.unit if o else 1.0 for o in of])
        self._thresholds_bits = np.array(
            [o.packed.threshold_bits if o else 0 for o in of], np.uint32
        )
        #: [E, levels of a choice]: the tiers that samples are quantised to.
        self._tiers = np.array([_tiers(o.exact if o else NO_LEVELS) for o in of], np.int8)
        #: Elements that each sampled block stands for.
        self._lengths = lengths * (numel / lengths.sum())

    def squares(self, levels: npt.NDArray[np.int8], residual_sq: F64Array) -> F64Array:
        """[PARTS]: the squared error of reading `levels` [out_blocks, E], by each part's estimate.

        `residual_sq` [out_blocks, E] is that of each delta's residual. Infinite where that is.
        """
        if not np.isfinite(residual_sq).all():
            return np.full(PARTS, np.inf)
        near = self._near(levels[self._out_blocks])
        if self._simulate is None:
            return self._of_sum(self._deltas - near, residual_sq)
        n_experts = len(self._rows)
        update = self._simulate(near.reshape(n_experts, -1))
        return self._weighed(np.square(self._full - update, dtype=np.float64))

    @cached_property
    def _deltas(self) -> Samples:
        """[E, blocks, SAMPLE_WIDTH] of δ."""
        bits = np.zeros((len(self._rows), len(self._blocks), SAMPLE_WIDTH), np.uint16)
        for i, s in enumerate(self._stats):
            own = s.block_sample[self._blocks[self._blocks < len(s.block_sample)]]
            bits[i, : len(own)] = own
        return widened(bits)

    @cached_property
    def _full(self) -> Samples:
        assert self._simulate is not None
        return self._simulate(self._deltas.reshape(len(self._rows), -1).copy())

    def _near(self, levels: Levels) -> Samples:
        """The samples as they are read at `levels` [blocks, E]."""
        from mergepipe_pipeline.packs.quantise import quantised

        tiers = np.take_along_axis(self._tiers, levels.T.astype(np.intp), axis=1)
        return quantised(self._deltas, self._units, self._thresholds_bits, tiers)

    def _of_sum(self, residuals: Samples, residual_sq: F64Array) -> F64Array:
        """The residuals' exact squared norm, times the share that samples say does not cancel."""
        factor = np.array([r.coefficient for r in self._rows])
        keep = np.array([r.keep for r in self._rows])
        exact = float((residual_sq @ (np.square(factor) * keep)).sum())
        own = np.einsum("e,ebk->bk", np.square(factor) * keep, np.square(residuals))
        # What random drops keep on average adds up; what they make of it is orthogonal.
        mean = np.einsum("e,ebk->bk", factor * keep, residuals)
        spread = np.einsum("e,ebk->bk", np.square(factor) * keep * (1 - keep), np.square(residuals))
        alone = self._weighed(own).mean()
        if not alone > 0:
            return np.full(PARTS, exact)
        squares: F64Array = self._weighed(np.square(mean) + spread) * (exact / alone)
        return squares

    def _weighed(self, squares: npt.NDArray[np.floating]) -> F64Array:
        by_part = squares.reshape(len(self._blocks), -1, PARTS).sum(axis=1)
        weighed: F64Array = self._lengths @ by_part * (PARTS / SAMPLE_WIDTH)
        return weighed


def _tiers(exact: BoolArray) -> list[int]:
    """For each number of a choice the tier of its level, or X where that is exact."""
    lossy = [_X if is_exact else tier for tier, is_exact in enumerate(exact.tolist())]
    return [NOT_READ, *lossy, _X]
