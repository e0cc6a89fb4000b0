"""Codes with scales: how the values of a logical tensor follow from several stored ones.

A value is (code − zero) · scale, computed in float32 and rounded once to the type of the scales. A
scale belongs to a block of rows and columns of a matrix: one element of fp8 by blocks (DeepSeek-V3,
https://arxiv.org/abs/2412.19437), a run of 16 or 32 columns in NVFP4 and the MX formats (OCP
Microscaling Formats 1.0), a row, or all of it. Pure description: `checkpoints.codes` decodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from mergepipe_pipeline.domain.blocks import MIN_BLOCK_ELEMS, Range, coalesce, total_elems
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.code_schemes import N_BITS, Element
from mergepipe_pipeline.dtypes import itemsize

#: Rows and columns of the blocks of fp8 that results are written in, and the name of their scales.
FP8_BLOCK, SCALES = 128, "_scale_inv"

#: A stored tensor, and a range of its elements.
StoredRange = tuple[TensorEntry, int, int]


def stored_as(
    name: str, shape: tuple[int, ...], dtype: str, *, is_coded: bool
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Name, dtype and shape of a tensor in a file; of one that `is_coded`, its codes and scales."""
    if not is_coded:
        return ((name, dtype, shape),)
    grid = tuple(-(-n // FP8_BLOCK) for n in shape[-2:])
    return ((name, "F8_E4M3", shape), (name + SCALES, "F32", (*shape[:-2], *grid)))


@dataclass(frozen=True, slots=True)
class Codes:
    """What makes values of the codes that a part stores.

    The values have `shape` and `dtype`; the last two dimensions are a matrix of codes, turned if
    `is_turned`. Rows and columns of `block` share a scale. `factor` multiplies all scales, or with
    `is_divisor` divides them. `stated_shape` is a stored tensor that says the shape.
    """

    element: Element
    dtype: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    scales: TensorEntry
    zeros: TensorEntry | None = None
    factor: TensorEntry | None = None
    is_divisor: bool = False
    stated_shape: TensorEntry | None = None
    is_turned: bool = False

    @property
    def rule(self) -> list[Any]:
        """What tells its values from others of the same stored tensors, as JSON material."""
        return [self.element, self.dtype, self.shape, self.block, self.is_divisor, self.is_turned]

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The stored tensors besides the codes."""
        rest = (self.zeros, self.factor, self.stated_shape)
        return (self.scales, *(entry for entry in rest if entry))

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of a matrix of codes."""
        rows, cols = self.shape[-2:]
        return (cols, rows) if self.is_turned else (rows, cols)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of a matrix's scales."""
        (rows, cols), (n_rows, n_cols) = self.matrix, self.block
        return -(-rows // n_rows), -(-cols // n_cols)

    @property
    def is_run(self) -> bool:
        """Whether the elements of a scale lie together, and blocks of all grids hold whole ones."""
        n_rows, n_cols = self.block
        return n_rows == 1 and self.matrix[1] % n_cols == 0 and MIN_BLOCK_ELEMS % n_cols == 0

    def scale_range(self, start_elem: int, stop_elem: int) -> Range:
        """The scales of elements [start, stop) of matrices that are not turned."""
        if self.scales.numel == 1:
            return 0, 1
        if self.is_run:
            n_cols = self.block[1]
            return start_elem // n_cols, (stop_elem - 1) // n_cols + 1
        first, last = (self._grid_row(elem) for elem in (start_elem, stop_elem - 1))
        return first * self.grid[1], (last + 1) * self.grid[1]

    def stored_ranges(
        self, codes: TensorEntry, start_elem: int, stop_elem: int
    ) -> Iterator[StoredRange]:
        """The stored elements that values [start, stop) follow from."""
        if start_elem >= stop_elem:
            return
        if self.is_turned:
            yield from self._turned_ranges(codes, start_elem, stop_elem)
        else:
            yield codes, *self.code_range(codes, start_elem, stop_elem)
            yield self.scales, *self.scale_range(start_elem, stop_elem)
        if self.zeros:
            yield self.zeros, *self.zero_range(start_elem, stop_elem)
        for entry in (self.factor, self.stated_shape):
            if entry:
                yield entry, 0, entry.numel

    def read_nbytes(self, codes: TensorEntry, ranges: Iterable[Range]) -> int:
        """Bytes that reading the values of disjoint ranges takes: what they share counts once."""
        if not self.is_turned:
            by_entry: dict[TensorEntry, list[Range]] = {}
            for entry, *stored in (s for r in ranges for s in self.stored_ranges(codes, *r)):
                by_entry.setdefault(entry, []).append((stored[0], stored[1]))
            return sum(total_elems(coalesce(r)) * itemsize(e.dtype) for e, r in by_entry.items())
        n_elems, (n_rows, n_groups) = prod(self.shape[-2:]), self.grid
        groups = coalesce(
            (matrix * n_groups + first, matrix * n_groups + stop)
            for a, b in ranges
            for matrix in range(a // n_elems, (b - 1) // n_elems + 1)
            for first, stop in (self.turned_groups(matrix, a, b),)
        )
        return (
            total_elems(groups)
            * n_rows
            * (codes.nbytes + self.scales.nbytes)
            // (self.scales.numel or 1)
        )

    def code_range(self, codes: TensorEntry, start_elem: int, stop_elem: int) -> Range:
        """The stored elements of `codes` that hold those of values [start, stop)."""
        n_bits, width = N_BITS[self.element], 8 * itemsize(codes.dtype)
        return start_elem * n_bits // width, -(-stop_elem * n_bits // width)

    def zero_range(self, start_elem: int, stop_elem: int) -> Range:
        """The stored elements of the zeros of values [start, stop): whole rows of them."""
        assert self.zeros is not None
        if self.zeros.dtype != "I32":
            return self.scale_range(start_elem, stop_elem)
        # Packed along rows, several rows of the grid in a row of words.
        per_word = 32 // N_BITS[self.element]
        first, last = (self._grid_row(elem) for elem in (start_elem, stop_elem - 1))
        n_cols = self.grid[1]
        return first // per_word * n_cols, (last // per_word + 1) * n_cols

    def turned_groups(self, matrix: int, start_elem: int, stop_elem: int) -> Range:
        """The columns of scales of a turned matrix that values [start, stop) need."""
        rows, cols = self.shape[-2:]  # of values: a row of them is a column of codes
        at = matrix * rows * cols
        first = max(0, start_elem - at) // cols
        last = (min(rows * cols, stop_elem - at) - 1) // cols
        return first // self.block[1], last // self.block[1] + 1

    def _turned_ranges(
        self, codes: TensorEntry, start_elem: int, stop_elem: int
    ) -> Iterator[StoredRange]:
        n_elems, (n_rows, n_groups) = prod(self.shape[-2:]), self.grid
        per_group = self.block[1] * N_BITS[self.element] // (8 * itemsize(codes.dtype))
        for matrix in range(start_elem // n_elems, (stop_elem - 1) // n_elems + 1):
            first, stop = self.turned_groups(matrix, start_elem, stop_elem)
            whole = (first, stop) == (0, n_groups)
            for row in (
                (matrix * n_rows,) if whole else range(matrix * n_rows, (matrix + 1) * n_rows)
            ):
                a = row * n_groups + first
                b = (row + n_rows) * n_groups if whole else row * n_groups + stop
                yield codes, a * per_group, b * per_group
                yield self.scales, a, b

    def _grid_row(self, elem: int) -> int:
        """The row of scales, of all matrices, that an element belongs to."""
        rows, cols = self.matrix
        row = elem // cols
        return row // rows * self.grid[0] + row % rows // self.block[0]
