"""Every block that a plan could buy, as flat arrays.

One row per (output tensor, expert); one candidate per (row, block). What a block is worth comes
from the catalog's statistics; nothing is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.spec.blocks import BlockGrid


@dataclass(frozen=True)
class Row:
    """One expert's part in one output tensor.

    `tensor` and `position` number the output tensor and the expert; `coefficient` is the effective
    cᵢ of δᵢ. `block_*` have one entry per block of the grid, or are None without a base to differ
    from. `bundle_nbytes`: the row can only be bought whole, for so many bytes (an adapter's
    factors); None where each block has its own bytes.
    """

    tensor: int
    position: int
    name: str
    numel: int
    itemsize: int
    coefficient: float
    block_l2sq: npt.NDArray[np.float64] | None
    block_max_abs: npt.NDArray[np.float32] | None
    block_nonzero: npt.NDArray[np.int64] | None
    bundle_nbytes: int | None = None


@dataclass(frozen=True)
class Candidates:
    """Flat arrays over all (row, block), ordered by row, then block.

    `site` numbers (output tensor, block): candidates of one site are alternatives' neighbours, the
    same elements of the merged tensor. `nbytes` is the cost, `gain` ‖c·δ‖², `zero` marks deltas
    known to be all zero. `unit` numbers what is bought together: a candidate alone, or a bundled
    row, whose bytes stand at its first candidate.
    """

    rows: tuple[Row, ...]
    grid: BlockGrid
    row: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]
    site: npt.NDArray[np.int64]
    n_sites: int
    nelems: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    norm: npt.NDArray[np.float64]
    max_abs: npt.NDArray[np.float64]
    coefficient: npt.NDArray[np.float64]
    zero: npt.NDArray[np.bool_]
    unit: npt.NDArray[np.int64]
    n_units: int

    @cached_property
    def unit_nbytes(self) -> npt.NDArray[np.int64]:
        """Cost of each unit in bytes."""
        return np.bincount(self.unit, self.nbytes, self.n_units).astype(np.int64)

    @cached_property
    def unit_gain(self) -> npt.NDArray[np.float64]:
        """‖c·δ‖² of each unit."""
        return np.bincount(self.unit, self.gain, self.n_units).astype(np.float64)

    @cached_property
    def unit_zero(self) -> npt.NDArray[np.bool_]:
        """Units whose deltas are known to be all zero."""
        zero: npt.NDArray[np.bool_] = np.bincount(self.unit, ~self.zero, self.n_units) == 0
        return zero

    @cached_property
    def unit_first(self) -> npt.NDArray[np.int64]:
        """The first candidate of each unit."""
        return np.unique(self.unit, return_index=True)[1]

    @property
    def gain(self) -> npt.NDArray[np.float64]:
        """‖c·δ‖² of each candidate."""
        return np.square(self.coefficient * self.norm)

    def row_slices(self) -> list[slice]:
        """The slice of candidates that belongs to each row."""
        stops = np.cumsum(np.bincount(self.row, minlength=len(self.rows)))
        return [
            slice(int(b) - int(n), int(b))
            for b, n in zip(stops, np.diff(stops, prepend=0), strict=True)
        ]


def lay_out(rows: Sequence[Row], grid: BlockGrid) -> Candidates:
    """The candidates of `rows` on `grid`. Unknown statistics count as infinitely worth having."""
    counts = np.array([grid.count(r.numel) for r in rows], dtype=np.int64)
    total = int(counts.sum())
    row = np.repeat(np.arange(len(rows)), counts)
    first = np.cumsum(counts) - counts
    block = np.arange(total) - np.repeat(first, counts)

    n_tensors = 1 + max((r.tensor for r in rows), default=-1)
    sites = np.zeros(n_tensors, dtype=np.int64)
    for r, n in zip(rows, counts, strict=True):
        sites[r.tensor] = max(sites[r.tensor], n)
    first_site = np.cumsum(sites) - sites
    site = np.repeat([first_site[r.tensor] for r in rows], counts).astype(np.int64) + block

    numel = np.repeat([r.numel for r in rows], counts).astype(np.int64)
    nelems = np.minimum(numel, (block + 1) * grid.block_elems) - block * grid.block_elems
    norm, max_abs, zero = np.full(total, np.inf), np.full(total, np.inf), np.zeros(total, np.bool_)
    for r, a, n in zip(rows, first, counts, strict=True):
        if r.block_l2sq is not None:
            norm[a : a + n] = np.sqrt(r.block_l2sq)
            max_abs[a : a + n] = r.block_max_abs
            none = np.asarray(r.block_nonzero == 0)
            zero[a : a + n] = none if r.bundle_nbytes is None else none.all()
    nbytes = nelems * np.repeat([r.itemsize for r in rows], counts).astype(np.int64)
    alone = np.repeat([r.bundle_nbytes is None for r in rows], counts).astype(np.bool_)
    unit = np.cumsum(alone | (block == 0)) - 1
    for r, a, n in zip(rows, first, counts, strict=True):
        if r.bundle_nbytes is not None and n:
            nbytes[a : a + n] = 0
            nbytes[a] = r.bundle_nbytes
    return Candidates(
        rows=tuple(rows),
        grid=grid,
        row=row,
        block=block,
        site=site,
        n_sites=int(sites.sum()),
        nelems=nelems,
        nbytes=nbytes,
        norm=norm,
        max_abs=max_abs,
        zero=zero,
        coefficient=np.repeat([r.coefficient for r in rows], counts).astype(np.float64),
        unit=unit,
        n_units=int(unit[-1]) + 1 if total else 0,
    )
