"""Which level of each block is read: what a choice of levels costs, and what it leaves.

A choice has one number per candidate: `NOTHING`, 1 + a level's number in `domain.pack.TIERS` for
what is read from a pack, or `ORIGINAL` for the expert's stored elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import BoolArray, F32Array, F64Array, I64Array, U32Array
from mergepipe_pipeline.domain.pack import TIERS, PackedInput, PackedRange
from mergepipe_pipeline.planner.candidates import Candidates, Choice, Row
from mergepipe_pipeline.planner.packed_rows import (
    N_RUNGS,
    NO_LEVELS,
    NOTHING,
    ORIGINAL,
    X20_LEVEL,
    PackedRow,
    RowLevels,
)

Levels = npt.NDArray[np.int8]


@dataclass(frozen=True)
class LevelTable:
    """The cost and the residual of candidates at every level. Arrays are [candidates]."""

    candidates: Candidates

    def nbytes(self, levels: Levels) -> I64Array:
        """Bytes that are read of each candidate; of factors, with the first that needs them."""
        out = np.where(levels == ORIGINAL, self.candidates.nbytes, 0)
        for cut, of in self._packed(levels):
            _put(levels[cut], of.packed.nbytes, NO_LEVELS, out[cut])
            first, nbytes = factors_read(levels[cut], of.packed)
            out[cut.start + first] += nbytes
        return out

    def residual_sq(self, levels: Levels) -> F64Array:
        """‖δ − δ̂‖² of each candidate at most, without its coefficient; 0 for what is exact."""
        c = self.candidates
        out = np.where(levels == NOTHING, self.delta_sq, 0.0)
        for cut, of in self._packed(levels):
            _put(levels[cut], of.packed.residual_sq, of.exact, out[cut])
        out[c.zero] = 0.0
        return out

    @cached_property
    def bundles(self) -> list[slice]:
        """The candidates of each row that is read whole."""
        rows = zip(self.candidates.rows, self.candidates.row_slices(), strict=True)
        return [cut for row, cut in rows if row.bundle_nbytes is not None]

    @cached_property
    def delta_sq(self) -> F64Array:
        """‖δ‖² of each candidate."""
        return np.square(self.candidates.norm)

    def is_near(self, levels: Levels) -> Choice:
        """Candidates that are approximated."""
        out = np.zeros(len(levels), np.bool_)
        for cut, of in self._packed(levels):
            exact = np.concatenate([[True], of.exact, [True]])
            out[cut] = ~exact[levels[cut]]
        return out

    def lengths(self, levels: Levels) -> F64Array:
        """How many times as long δ̂ of each candidate is read."""
        out = np.ones(len(levels))
        for cut, of in self._packed(levels):
            out[cut] = of.lengths[levels[cut]]
        return out

    @cached_property
    def cheapest(self) -> Levels:
        """Each candidate's exact level of the fewest bytes; zero deltas have none.

        On a network or a slow disk fewer bytes take less time, too; a core decodes 0.25 GB/s.
        """
        c = self.candidates
        out = np.where(c.zero, np.int8(NOTHING), np.int8(ORIGINAL))
        for row, cut in zip(c.rows, c.row_slices(), strict=True):
            if row.levels is not None:
                stored = np.where(c.zero[cut], 0, c.nbytes[cut])
                _put_least_exact(row.levels, stored, out[cut])
        return out

    def _packed(self, levels: Levels) -> Iterator[tuple[slice, RowLevels]]:
        """Rows of which something is read from a pack, and their candidates."""
        c = self.candidates
        is_read = np.zeros(len(c.rows), np.bool_)
        is_read[c.row[_is_packed(levels)]] = True
        ends = np.append(c.first, len(c.row))
        for number in np.flatnonzero(is_read).tolist():
            of = c.rows[number].levels
            assert of is not None
            yield slice(int(ends[number]), int(ends[number + 1])), of


def factors_read(levels: Levels, packed: PackedRow) -> tuple[int, int]:
    """The first block of a row whose level needs factors, and their bytes; 0 for both if none."""
    with_factors = _is_packed(levels) & (levels != X20_LEVEL)
    if not with_factors.any():
        return 0, 0
    rung = min(int(levels[with_factors].max()), N_RUNGS)
    return int(with_factors.argmax()), int(packed.rung_nbytes[rung - 1])


def packed_input(row: Row, levels: Levels, block_elems: int) -> PackedInput | None:
    """Return the ranges of a row's pack that its levels read; None for none."""
    of = row.levels
    if of is None or not _is_packed(levels).any():
        return None
    nbytes = np.zeros(len(levels), np.int64)
    _put(levels, of.packed.nbytes, NO_LEVELS, nbytes)
    starts = np.flatnonzero(np.diff(levels, prepend=-1))
    elems = np.minimum(np.append(starts, len(levels)) * block_elems, row.numel).tolist()
    runs = zip(
        pairwise(elems),
        levels[starts].tolist(),
        np.add.reduceat(nbytes, starts).tolist(),
        strict=True,
    )
    exact, lengths = of.exact.tolist(), of.lengths.tolist()
    ranges = tuple(
        PackedRange(start, stop, TIERS[level - 1], run_nbytes, exact[level - 1], lengths[level])
        for (start, stop), level, run_nbytes in runs
        if NOTHING < level < ORIGINAL
    )
    packed = of.packed
    _, factor_nbytes = factors_read(levels, packed)
    place = packed.pack, packed.tensor, packed.unit, packed.factors
    return PackedInput(*place, factor_nbytes, ranges)


def _put_least_exact(of: RowLevels, stored_nbytes: I64Array, out: Levels) -> None:
    """Put the exact levels of a pack that read the fewest bytes of a row into `out` [blocks].

    Only where these are fewer than the stored ones [blocks]. Factors are read once for all blocks,
    or, if that is less in all, only levels that need none.
    """
    can = of.exact[:, None] & np.isfinite(of.packed.residual_sq)
    nbytes = np.where(can, of.packed.nbytes.astype(np.int64), np.iinfo(np.int64).max)
    most = 0
    for stop, fee in ((X20_LEVEL, 0), (len(nbytes), of.packed.rung_nbytes[-1])):
        least = nbytes[:stop].min(axis=0)
        saved = np.maximum(stored_nbytes - least, 0).sum() - fee
        if saved > most:
            most, is_less = saved, least < stored_nbytes
            out[is_less] = 1 + nbytes[:stop].argmin(axis=0)[is_less]


def _put(
    levels: Levels, table: U32Array | F32Array, skip: BoolArray, out: I64Array | F64Array
) -> None:
    # It loads the compiler, which plans that read no pack do without.
    from mergepipe_pipeline.planner.hulls import at_levels

    at_levels(levels, table, skip, out)


def _is_packed(numbers: Levels) -> Choice:
    packed: Choice = (numbers > NOTHING) & (numbers < ORIGINAL)
    return packed
