"""What packs offer to a merge, in arrays: per row, level and block its bytes and its residual.

A level is numbered by its place in `domain.pack.TIERS`; the arrays of a row are on the grid that
the plan is made on, whose blocks are whole chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, F32Array, F64Array, I64Array, U32Array
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, FACTORED, TIERS, TIERS_OF, PackSource
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.planner.lengths import Trimmed, lengths_of

#: Levels of neighbours differ little: more blocks would make plans longer, and hardly better.
_MOST_BLOCKS = 1 << 20

N_LEVELS = len(TIERS)
#: The first levels are rungs: a row is read with the same one as a whole.
N_RUNGS = len(FACTORED)
#: In a choice of levels: nothing is read, and the expert's stored elements are. Between them stands
#: 1 + a level's number.
NOTHING, ORIGINAL = 0, 1 + N_LEVELS
#: [levels]: none of them is exact.
NO_LEVELS = np.zeros(N_LEVELS, np.bool_)
#: In a choice of levels, the last that approximates.
LAST_NEAR = 1 + TIERS.index("L3")
_X20, _X = TIERS.index("X20"), TIERS.index("X")
#: In a choice of levels, the exact ones, of which X20 needs no factors.
X20_LEVEL, X_LEVEL = 1 + _X20, 1 + _X
#: [levels, tiers]: which tiers of blocks are read for each level.
_READ = np.array(
    [[tier in TIERS_OF[level] and tier not in FACTORED for tier in TIERS] for level in TIERS],
    np.uint32,
)


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """One tensor of pack number `pack` on a grid; its name there, unit, factors, threshold, tails.

    `rung_nbytes` int64 [rungs]: what is read of the factors up to each rung, once for all blocks.
    `nbytes` uint32 [levels, blocks]: what is read of a block for a level besides. `residual_sq`
    float32 [levels, blocks]: ‖δ − δ̂‖² at most, infinite where the level cannot be used.
    """

    pack: int
    tensor: str
    unit: float
    factors: str
    threshold_bits: int
    rung_nbytes: I64Array
    nbytes: U32Array
    residual_sq: F32Array
    tails: F32Array


@dataclass(frozen=True, kw_only=True)
class Packs:
    """The packs that a recipe's experts have, and by (expert's model number, base's) their rows.

    Rows are by (expert's tensor, base's tensor), on `grid`.
    """

    sources: tuple[PackSource, ...]
    grid: PackGrid
    rows: Mapping[tuple[int, int], Mapping[tuple[str, str], PackedRow]]


@dataclass(frozen=True, kw_only=True)
class RowLevels:
    """The levels of a packed row that are `usable` by a method, and that are `exact`.

    [levels] each. An exact level gives what the expert itself gives. `trimmed`: what a trim keeps.
    """

    packed: PackedRow
    usable: BoolArray = field(repr=False)
    exact: BoolArray = field(repr=False)
    trimmed: Trimmed | None = None

    @cached_property
    def lengths(self) -> F64Array:
        """[choices]: how many times as long δ̂ is read, also for nothing and what is stored."""
        lengths = np.ones(2 + N_LEVELS)
        if self.trimmed is not None:
            tails, left = self.packed.tails, self.packed.residual_sq
            lengths[1 : 1 + len(tails)] = lengths_of(tails, left, self.trimmed)
        return lengths


@dataclass(frozen=True, slots=True)
class PackGrid(BlockGrid):
    """Blocks of whole chunks, of any size."""

    def __post_init__(self) -> None:
        assert self.block_elems % CHUNK_ELEMS == 0


def pack_grid(grid: BlockGrid, n_elems: int) -> PackGrid:
    """The grid for a plan that reads `n_elems` elements of experts at most.

    Its blocks are no smaller than those of `grid`, and about `_MOST_BLOCKS` at most.
    """
    least = max(grid.block_elems, CHUNK_ELEMS, -(-n_elems // _MOST_BLOCKS))
    return PackGrid(1 << (least - 1).bit_length())


def packed_row(
    pack: int,
    tensor: str,
    unit: float,
    factors: str,
    threshold_bits: int,
    tails: F32Array,
    nbytes: U32Array,
    residual_sq: F32Array,
) -> PackedRow:
    """A packed tensor; `nbytes` [tiers, blocks] and `residual_sq` [levels, blocks] on a grid."""
    return PackedRow(
        pack=pack,
        tensor=tensor,
        unit=unit,
        factors=factors,
        threshold_bits=threshold_bits,
        rung_nbytes=np.cumsum(nbytes[:N_RUNGS].sum(axis=1, dtype=np.int64)),
        nbytes=_READ @ nbytes,
        residual_sq=residual_sq,
        tails=tails,
    )


def row_levels(
    packed: PackedRow,
    trim: TrimRule | None,
    *,
    approximates: bool,
    trimmed: Trimmed | None = None,
) -> RowLevels:
    """Return the levels of a packed row that is trimmed by `trim`; all, or those that are exact."""
    exact = np.zeros(N_LEVELS, np.bool_)
    exact[_X] = True
    # X20 has every |δ| from its threshold up, and a trim keeps some of those from its own up.
    exact[_X20] = trim is not None and trim.threshold_bits >= packed.threshold_bits
    return RowLevels(packed=packed, usable=exact | approximates, exact=exact, trimmed=trimmed)
