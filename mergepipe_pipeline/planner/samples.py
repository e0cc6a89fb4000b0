"""What a choice of levels makes of a merge, tried on samples of the experts' deltas.

The catalog keeps δ at the same few elements of every block for all experts. For sums of deltas the
norms of what is missing are known exactly; samples only tell how what different experts lack adds
up. Other merges are tried with all experts, and with what is read of them: nothing, what a level
of a pack gives, or all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import BoolArray, F32Array, F64Array, U16Array
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.pack import NOT_READ, TIERS
from mergepipe_pipeline.domain.stats import SAMPLE_WIDTH, widened
from mergepipe_pipeline.planner.candidates import Row
from mergepipe_pipeline.planner.levels import Levels
from mergepipe_pipeline.planner.packed_rows import LAST_NEAR, NO_LEVELS, RowLevels

#: [E, n] float32 deltas of E experts to the merged update, [n] float32; the deltas may be
#: overwritten.
Simulate = Callable[[F32Array], F32Array]
#: Parts of the samples that estimate an error each for itself: by how far they disagree, what all
#: of them say may be off.
PARTS = 8
#: Standard errors on either side of an estimate that are stated with it.
STATED_ERRORS = 4
_X = TIERS.index("X")
#: Sampled elements of one tensor and all its experts that are tried at most.
_MAX_ELEMS = 1 << 18


class Samples:
    """The samples of one output tensor's experts: `stored` [blocks, width] each, as bfloat16.

    Their blocks are those of grid `sampled`, `rows` are on `grid`, whose blocks are as long or
    longer. `simulate` None: a sum of deltas, or what can only be taken for one.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        stored: Sequence[U16Array],
        grid: BlockGrid,
        sampled: BlockGrid,
        simulate: Simulate | None,
    ) -> None:
        self._rows, self._stored, self._simulate = rows, stored, simulate
        numel, elems = max(r.numel for r in rows), sampled.block_elems
        n_blocks = sampled.count(numel)
        # Evenly spread blocks, so many that all experts' samples stay small.
        step = -(-n_blocks // max(1, _MAX_ELEMS // (SAMPLE_WIDTH * len(rows))))
        self._blocks = np.arange(0, n_blocks, step)  # [blocks]: those tried
        self._out_blocks = self._blocks * elems // grid.block_elems
        lengths = np.minimum(elems, numel - elems * self._blocks).astype(np.float64)
        #: [blocks]: elements that each sampled block stands for.
        self._lengths = lengths * (numel / lengths.sum())

    def squares(self, choices: Sequence[Levels], residuals: Sequence[F64Array]) -> F64Array:
        """Squared errors [choices, PARTS] of reading levels, by each part's estimate.

        A choice is [out_blocks, E], as are the squared norms of what it leaves of each delta.
        Infinite where these are.
        """
        squares = np.zeros((len(choices), PARTS))
        deltas = self._deltas()
        full = self._simulate(_flat(deltas)) if self._simulate else None  # [blocks · width]
        # Where samples show no update they tell nothing: then what is missing is taken to add up.
        shows = full is not None and 0 < self._weighed(np.square(full, dtype=float)).mean() < np.inf
        for n, (levels, residual_sq) in enumerate(zip(choices, residuals, strict=True)):
            if not np.isfinite(residual_sq).all():
                squares[n] = np.inf
                continue
            read = self._as_read(deltas, levels[self._out_blocks])
            if full is None or self._simulate is None or not shows:
                squares[n] = self._of_sum(deltas - read, residual_sq)
            else:
                # Every method merges nothing to nothing.
                missing = full - self._simulate(_flat(read)) if read.any() else full
                squares[n] = self._weighed(np.square(missing, dtype=np.float64))
        return squares

    def _deltas(self) -> F32Array:
        """[E, blocks, width] of δ."""
        bits = np.zeros((len(self._rows), len(self._blocks), SAMPLE_WIDTH), np.uint16)
        for i, stored in enumerate(self._stored):
            own = stored[self._blocks[self._blocks < len(stored)]]
            bits[i, : len(own)] = own
        return widened(bits)

    def _as_read(self, deltas: F32Array, levels: Levels) -> F32Array:
        """[E, blocks, width]: the samples as they are read at `levels` [blocks, E]."""
        of = [row.levels for row in self._rows]
        if not any(of):
            return np.where(levels.T[:, :, None] > 0, deltas, np.float32(0))
        from mergepipe_pipeline.packs.ternary import quantised

        units = np.array([o.packed.unit if o else 1.0 for o in of])
        thresholds = np.array([o.packed.threshold_bits if o else 0 for o in of], np.uint32)
        tiers = np.array([_tiers(o.exact if o else NO_LEVELS) for o in of], np.int8)
        read = np.take_along_axis(tiers, levels.T.astype(np.intp), axis=1)  # [E, blocks]
        found = quantised(deltas, units, thresholds, read)
        for i, o in enumerate(of):
            if o and o.packed.factors:
                self._put_projected(i, o, deltas[i], levels[:, i], found[i])
                found[i] *= o.lengths[levels[:, i], None]
        return found

    def _put_projected(
        self, i: int, of: RowLevels, deltas: F32Array, levels: Levels, out: F32Array
    ) -> None:
        """Put samples of row `i` that are read with factors into `out` [blocks, width].

        What directions give of single elements is not known, only how long it is and what it leaves
        of a block: it looks like a share of δ with noise beside.
        """
        row, numbers = self._rows[i], levels - 1
        is_near = (levels > 0) & (levels <= LAST_NEAR) & ~np.append(of.exact, True)[numbers]
        near = np.flatnonzero(is_near)  # [blocks read so], as all below
        assert row.block_l2sq is not None
        places = self._out_blocks[near]
        delta_sq = row.block_l2sq[places]
        left = of.packed.residual_sq[numbers[near], places]
        with np.errstate(divide="ignore", invalid="ignore"):
            left = np.nan_to_num(left / delta_sq, posinf=1.0)
            # ‖δ̂‖² as a share of ‖δ‖², [near], and what of δ is in it.
            read_sq = of.packed.tails[numbers[near], 0] ** 2 * row.numel / row.block_l2sq.sum()
        keep = np.clip((1 + read_sq - left) / 2, 0, np.sqrt(read_sq))[:, None]
        rms = np.sqrt(np.square(deltas[near]).mean(axis=1, keepdims=True))
        noise = np.random.default_rng(i).standard_normal(deltas.shape, np.float32)[near]
        out[near] = keep * deltas[near] + np.sqrt(read_sq[:, None] - keep**2) * rms * noise

    def _of_sum(self, residuals: F32Array, residual_sq: F64Array) -> F64Array:
        """[PARTS]: the residuals' exact squared norm, times the share that does not cancel.

        The share is one ratio of all samples; parts differ by what they are off from it, so that
        what needs no samples has no spread.
        """
        factor = np.array([r.coefficient for r in self._rows])
        keep = np.array([r.keep for r in self._rows])
        weight = np.square(factor) * keep
        exact = float(np.einsum("be,e->", residual_sq, weight))
        own = self._weighed(np.einsum("e,ebk->bk", weight, np.square(residuals)))
        # What random drops keep on average adds up; what they make of it is orthogonal.
        mean = np.einsum("e,ebk->bk", factor * keep, residuals)
        spread = np.einsum("e,ebk->bk", weight * (1 - keep), np.square(residuals))
        together = self._weighed(np.square(mean) + spread)
        alone = own.mean()
        if not 0 < alone < np.inf:
            return np.full(PARTS, exact)
        share = together.mean() / alone
        squares: F64Array = exact * (share + (together - share * own) / alone)
        return squares

    def _weighed(self, squares: npt.NDArray[np.floating]) -> F64Array:
        """[PARTS]: the sum over all elements that squares at sampled ones stand for."""
        by_part = squares.reshape(len(self._blocks), -1, PARTS).sum(axis=1)
        # No BLAS, whose threads take longer to wake up than this takes.
        weighed: F64Array = np.einsum("b,bp->p", self._lengths, by_part) * (PARTS / SAMPLE_WIDTH)
        return weighed


def _flat(deltas: F32Array) -> F32Array:
    """A copy [E, blocks · width] of [E, blocks, width], to be overwritten."""
    return deltas.reshape(len(deltas), -1).copy()


def _tiers(exact: BoolArray) -> list[int]:
    """For each number of a choice the tier of its level, or X where that is exact."""
    lossy = [_X if is_exact else tier for tier, is_exact in enumerate(exact.tolist())]
    return [NOT_READ, *lossy, _X]
