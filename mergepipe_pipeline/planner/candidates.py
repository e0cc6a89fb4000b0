"""Every block that a plan could read, as flat arrays.

One row per (output tensor, expert); one candidate per (row, block). What a block is worth comes
from the catalog's statistics; nothing is read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import BoolArray, F64Array, I64Array
from mergepipe_pipeline.domain.blocks import BlockGrid, Range
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.planner.packed_rows import RowLevels

Choice = BoolArray
S = TypeVar("S", bound=np.generic)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One expert's part in one output tensor.

    `tensor` and `position` number the output tensor and the expert; `coefficient` is the effective
    cᵢ of δᵢ. `block_*` have one entry per block of the grid, or are None without a base to differ
    from; `block_sq_norm` is the expected part of ‖δ‖² that a sparsifying method keeps, and
    `kept_sq_norm` what all blocks together can keep at most. `keep` is the probability with which a
    random drop keeps an element. `is_sum`: the merge adds c·δ, or what a random drop leaves of it.
    `bundle_nbytes`: the row can only be read whole, for so many bytes (an adapter's factors); None
    where each block has its own. `coded` is its view if what is stored of it are codes: a block
    costs them and its scales, also those that another shares. `levels`: what a pack has of it.
    `is_vector`: the tensor has fewer than two dimensions.
    """

    tensor: int
    position: int
    name: str
    numel: int
    itemsize: int
    coefficient: float
    block_l2sq: F64Array | None
    block_nonzero: I64Array | None
    block_sq_norm: F64Array | None = None
    kept_sq_norm: float = np.inf
    keep: float = 1.0
    is_sum: bool = True
    bundle_nbytes: int | None = None
    coded: TensorView | None = None
    levels: RowLevels | None = None
    is_vector: bool = False


@dataclass(frozen=True)
class Candidates:
    """Flat arrays over all (row, block), ordered by row, then block.

    `out_block` numbers (output tensor, block): candidates of one output block are the same elements
    of the merged tensor. `nbytes` is the cost of the stored elements, `gain` ‖c·δ‖², `zero` marks
    deltas known to be all zero. `unit` numbers what is read together: a candidate alone, or a
    bundled row, whose bytes stand at its first candidate. `first` is each row's first candidate.
    """

    rows: tuple[Row, ...]
    grid: BlockGrid
    row: I64Array
    block: I64Array
    out_block: I64Array
    n_out_blocks: int
    first: I64Array
    nbytes: I64Array
    norm: F64Array
    sq_norm: F64Array
    coefficient: F64Array
    zero: Choice
    unit: I64Array
    n_units: int

    @cached_property
    def unit_zero(self) -> Choice:
        """Units whose deltas are known to be all zero."""
        zero: Choice = np.bincount(self.unit, ~self.zero, self.n_units) == 0
        return zero

    @cached_property
    def expert(self) -> I64Array:
        """The expert's position in the recipe, per candidate."""
        return np.array([r.position for r in self.rows], dtype=np.int64)[self.row]

    @cached_property
    def total_nbytes(self) -> int:
        """Bytes of all stored elements."""
        return int(self.nbytes.sum()) - self.shared_nbytes(np.ones(len(self.row), np.bool_))

    def shared_nbytes(self, read: Choice) -> int:
        """Bytes of scales that stand at several of the blocks that are read, and are read once."""
        shared = 0
        if all(r.coded is None for r in self.rows):
            return shared
        known = dict[tuple[str, tuple[Range, ...]], int]()  # of what is read whole, above all
        for r, cut, ranges in zip(self.rows, self.row_slices(), self.ranges(read), strict=True):
            if r.coded is not None and r.bundle_nbytes is None:
                once = (r.coded.layout, ranges)
                if once not in known:
                    known[once] = r.coded.read_nbytes(ranges)
                shared += int(self.nbytes[cut][read[cut]].sum()) - known[once]
        return shared

    @property
    def gain(self) -> F64Array:
        """‖c·δ‖² of each candidate."""
        return np.square(self.coefficient * self.norm)

    def ranges(self, taken: Choice) -> list[tuple[Range, ...]]:
        """The runs of `taken` candidates of each row, as element ranges."""
        new = np.diff(self.row, prepend=-1) != 0  # [candidates], as all masks here
        starts = np.flatnonzero(taken & (new | ~np.roll(taken, 1)))
        stops = np.flatnonzero(taken & np.roll(new | ~taken, -1))
        row, elems = self.row[starts], self.grid.block_elems
        numel = np.array([r.numel for r in self.rows], np.int64)[row]
        edges = self.block[starts] * elems, np.minimum((self.block[stops] + 1) * elems, numel)
        runs = zip(*(edge.tolist() for edge in edges), strict=True)
        counts = np.bincount(row, minlength=len(self.rows))
        return [tuple(islice(runs, n)) for n in counts.tolist()]

    def row_slices(self) -> list[slice]:
        """The slice of candidates that belongs to each row."""
        edges = [*self.first.tolist(), len(self.row)]
        return [slice(a, b) for a, b in pairwise(edges)]

    def groups(self) -> Iterator[Group]:
        """The candidates of each output tensor as a table, in order."""
        slices = self.row_slices()
        start = 0
        while start < len(self.rows):
            stop = start
            while stop < len(self.rows) and self.rows[stop].tensor == self.rows[start].tensor:
                stop += 1
            yield Group(self, self.rows[start].tensor, start, slices[start:stop])
            start = stop


@dataclass(frozen=True)
class Group:
    """One output tensor's candidates as a table of output blocks by experts."""

    candidates: Candidates
    tensor: int
    first_row: int
    slices: Sequence[slice]

    @property
    def rows(self) -> Sequence[Row]:
        """One per column."""
        return self.candidates.rows[self.first_row : self.first_row + len(self.slices)]

    @property
    def n_out_blocks(self) -> int:
        """Blocks of the longest expert."""
        return max(int(s.stop - s.start) for s in self.slices)

    def table(self, values: npt.NDArray[S]) -> npt.NDArray[S]:
        """[out_blocks, E] of an array over candidates, 0 where an expert has no such block."""
        out = np.zeros((self.n_out_blocks, len(self.slices)), values.dtype)
        for i, s in enumerate(self.slices):
            out[: s.stop - s.start, i] = values[s]
        return out


def lay_out(rows: Sequence[Row], grid: BlockGrid) -> Candidates:
    """The candidates of `rows` on `grid`. Unknown statistics count as infinitely worth having."""
    counts = np.array([grid.count(r.numel) for r in rows], dtype=np.int64)  # [rows]
    first = np.cumsum(counts) - counts  # [rows]
    row = np.repeat(np.arange(len(rows)), counts)  # [candidates], as all below but first_out_block
    block = np.arange(len(row)) - first[row]
    first_out_block, n_out_blocks = _first_out_blocks(rows, counts)  # [tensors]
    tensor = np.array([r.tensor for r in rows], dtype=np.int64)[row]
    coefficient = np.array([r.coefficient for r in rows], dtype=np.float64)[row]
    l2sq, zero = _changes(rows, first, counts)
    nbytes, unit = _costs(rows, grid, row, block)
    return Candidates(
        rows=tuple(rows),
        grid=grid,
        row=row,
        block=block,
        out_block=first_out_block[tensor] + block,
        n_out_blocks=n_out_blocks,
        first=first,
        nbytes=nbytes,
        norm=np.sqrt(l2sq),
        sq_norm=_kept_sq_norm(rows, first, counts, l2sq, coefficient),
        zero=zero,
        coefficient=coefficient,
        unit=unit,
        n_units=int(unit[-1]) + 1 if len(unit) else 0,
    )


def _first_out_blocks(rows: Sequence[Row], counts: I64Array) -> tuple[I64Array, int]:
    """The number of each output tensor's first output block, [tensors], and how many there are.

    A tensor has as many output blocks as the longest of its rows has blocks.
    """
    n_blocks = np.zeros(1 + max((r.tensor for r in rows), default=-1), dtype=np.int64)  # [tensors]
    for r, n in zip(rows, counts, strict=True):
        n_blocks[r.tensor] = max(n_blocks[r.tensor], n)
    return np.cumsum(n_blocks) - n_blocks, int(n_blocks.sum())


def _changes(rows: Sequence[Row], first: I64Array, counts: I64Array) -> tuple[F64Array, Choice]:
    """‖δ‖² of each candidate, infinite where it is unknown or NaN, and whether δ is all zero."""
    l2sq = np.full(int(counts.sum()), np.inf)  # [candidates]
    zero = np.zeros(len(l2sq), np.bool_)
    for r, a, n in zip(rows, first, counts, strict=True):
        if r.block_l2sq is not None:
            l2sq[a : a + n] = r.block_l2sq
            is_zero = np.asarray(r.block_nonzero == 0)  # [n] blocks
            # A bundle is read whole or not at all, so one block that differs is enough.
            zero[a : a + n] = is_zero if r.bundle_nbytes is None else is_zero.all()
    l2sq[np.isnan(l2sq)] = np.inf
    return l2sq, zero


def _kept_sq_norm(
    rows: Sequence[Row], first: I64Array, counts: I64Array, l2sq: F64Array, coefficient: F64Array
) -> F64Array:
    """c²·‖δ‖² of each candidate, of what a sparsifying method keeps; not scaled where unknown."""
    sq_norm = l2sq.copy()  # [candidates]
    for r, a, n in zip(rows, first, counts, strict=True):
        if r.block_sq_norm is not None:
            sq_norm[a : a + n] = r.block_sq_norm
    is_known = np.repeat([r.block_l2sq is not None for r in rows], counts).astype(np.bool_)
    np.multiply(sq_norm, np.square(coefficient), out=sq_norm, where=is_known)
    return sq_norm


def _costs(
    rows: Sequence[Row], grid: BlockGrid, row: I64Array, block: I64Array
) -> tuple[I64Array, I64Array]:
    """Bytes of each candidate, and the unit that it is read with.

    A bundled row is one unit, whose bytes all stand at its first candidate.
    """
    numel = np.array([r.numel for r in rows], dtype=np.int64)[row]  # [candidates], as all below
    nelems = np.minimum(numel, (block + 1) * grid.block_elems) - block * grid.block_elems
    nbytes = nelems * np.array([r.itemsize for r in rows], dtype=np.int64)[row]
    starts = np.searchsorted(row, np.arange(len(rows)))  # [rows], in the order of candidates
    known = dict[str, list[int]]()  # experts of a family, and their layers, lie alike
    for start, r in zip(starts, rows, strict=True):
        if r.coded is not None:
            ranges = [grid.range_of(b, r.numel) for b in range(grid.count(r.numel))]
            if r.coded.layout not in known:
                known[r.coded.layout] = [r.coded.read_nbytes((block,)) for block in ranges]
            nbytes[start : start + len(ranges)] = known[r.coded.layout]
    bundles = [(r.bundle_nbytes is not None, r.bundle_nbytes or 0) for r in rows]
    is_bundled = np.array([bundled for bundled, _ in bundles], np.bool_)[row]
    bundle_nbytes = np.array([n for _, n in bundles], np.int64)[row]
    nbytes = np.where(is_bundled, np.where(block == 0, bundle_nbytes, 0), nbytes)
    unit = np.cumsum(~is_bundled | (block == 0)) - 1
    return nbytes, unit
