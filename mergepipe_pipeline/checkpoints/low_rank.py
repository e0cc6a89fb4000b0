"""Updates of adapters in runs of elements, without ever holding the whole product.

Low-rank updates δ = scale · b·a are taken in tiles of whole rows whose place depends on the
tensor's shape alone, so that an element has the same bits whatever run of elements is asked for.
Source: LoRA (https://arxiv.org/abs/2106.09685), DoRA (https://arxiv.org/abs/2402.09353), PiSSA
(https://arxiv.org/abs/2404.02948) and OLoRA (https://arxiv.org/abs/2406.01775) as PEFT stores and
merges them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mergepipe_pipeline.checkpoints.stored import Readers, Verifier, as_float32, read_stored
from mergepipe_pipeline.concurrency.threads import single_threaded_torch
from mergepipe_pipeline.domain.segments import KnownSegments
from mergepipe_pipeline.domain.view import LowRank, Part, RowValues, Update, view_of_part
from mergepipe_pipeline.dtypes import itemsize

if TYPE_CHECKING:
    import torch

#: About this many elements of the product are computed at once.
_TILE_ELEMS = 1 << 16


def open_update(
    readers: Readers, update: Update | None, known: KnownSegments | None = None
) -> AdapterUpdate | None:
    """The computation of a view's update, if it has one. With `known` its bytes are verified."""
    if update is None:
        return None
    if isinstance(update, RowValues):
        return RowValuesUpdate(readers, update, known)
    return LowRankUpdate(readers, update, known)


class AdapterUpdate(ABC):
    """The update of one tensor; what it needs is read once, when first needed. Safe for threads."""

    #: Whether rows that are updated must hold values T, not differences from the base.
    needs_values: bool

    def __init__(self, readers: Readers, known: KnownSegments | None) -> None:
        self._stored = _Stored(readers, known)
        self._lock = threading.Lock()
        self._loaded = False

    def load(self) -> None:
        """Read what the update is computed from."""
        # The last bits of an SVD depend on how many threads share it. That is a setting of each
        # thread, which a new thread inherits for some operations only.
        with self._lock, single_threaded_torch():
            if not self._loaded:
                self._load()
                self._loaded = True

    def add_to(self, row: torch.Tensor, start_elem: int) -> None:
        """Update elements [start, start + n) in `row`, float32 [n] on any device."""
        self.load()
        if len(row):
            with single_threaded_torch():
                self._add_to(row, start_elem)

    @abstractmethod
    def _load(self) -> None: ...

    @abstractmethod
    def _add_to(self, row: torch.Tensor, start_elem: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Term:
    """scale · left·right: `left` [n · n_rows, r], `right` [n, r, n_cols] of n matrices."""

    left: torch.Tensor
    right: torch.Tensor
    scale: float

    @property
    def n_cols(self) -> int:
        return self.right.shape[2]

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of the product; they lie in one matrix."""
        matrix = first // (len(self.left) // len(self.right))
        return (self.left[first:last] @ self.right[matrix]).mul_(self.scale)


class LowRankUpdate(AdapterUpdate):
    """The update of a low-rank pair, of several of them, or of one that keeps rows' lengths."""

    def __init__(
        self, readers: Readers, low_rank: LowRank, known: KnownSegments | None = None
    ) -> None:
        super().__init__(readers, known)
        self._spec = low_rank
        self.needs_values = low_rank.needs_values
        self._terms: list[_Term] = []
        self._factor: torch.Tensor | None = None

    def _load(self) -> None:
        spec: LowRank | None = self._spec
        while spec:
            self._terms.append(_term(self._stored, spec))
            if spec.is_residual:
                assert spec.weights is not None
                weights = self._stored.read(spec.weights)
                subtracted = _orthogonal if spec.is_orthogonal else _principal
                self._terms.append(subtracted(weights, spec))
            spec = spec.second
        if self._spec.magnitude is not None:
            assert self._spec.weights is not None
            if self._spec.is_residual:
                tiles = iter([(0, weights)])
            else:
                tiles = self._stored.row_tiles(self._spec.weights)
            self._factor = self._length_factor(tiles, self._stored.read(self._spec.magnitude))

    def _add_to(self, row: torch.Tensor, start_elem: int) -> None:
        """The product is made here: every library of matrix products adds up in its own order."""
        n_cols = self._terms[0].n_cols
        stop_elem = start_elem + len(row)
        for first, last in self._tiles(start_elem // n_cols, -(-stop_elem // n_cols)):
            at, end = first * n_cols, last * n_cols
            a, b = max(start_elem, at), min(stop_elem, end)
            part = row[a - start_elem : b - start_elem]
            for term in self._terms:
                tile = term.rows(first, last).view(-1)
                part.add_(tile[a - at : b - at].to(row.device))
            if self._factor is not None:
                factor = self._factor[first:last] if len(self._factor) > 1 else self._factor
                whole = factor.expand(last - first, n_cols).reshape(-1)
                part.mul_(whole[a - at : b - at].to(row.device))

    def _tiles(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The tiles that rows [first, last) lie in; none reaches into two matrices of a stack."""
        term = self._terms[0]
        n_tile = max(1, _TILE_ELEMS // term.n_cols)
        n_rows = len(term.left) // len(term.right)
        while first < last:
            matrix_start = first // n_rows * n_rows
            start = matrix_start + (first - matrix_start) // n_tile * n_tile
            stop = min(start + n_tile, matrix_start + n_rows)
            yield start, stop
            first = stop

    def _length_factor(
        self, tiles: Iterator[tuple[int, torch.Tensor]], magnitude: torch.Tensor
    ) -> torch.Tensor:
        """The factor that makes each row of length m: [n_rows, 1], or [1, n_cols] if transposed.

        `tiles` are W, some rows after the other.

        Source: DoRA, W' = m · (W + ΔW) / ‖W + ΔW‖, arXiv:2402.09353.
        """
        import torch

        n_cols, sums = self._terms[0].n_cols, []
        for first, weights in tiles:
            for term in self._terms:
                weights += term.rows(first, first + len(weights))
            squares = weights.double().square_()
            sums.append(squares.sum(0 if self._spec.transposed else 1))
        squared = torch.stack(sums).sum(0) if self._spec.transposed else torch.cat(sums)
        factor = (magnitude.view(-1).double() / squared.sqrt()).float()
        return factor.view(1, n_cols) if self._spec.transposed else factor.view(-1, 1)


def _term(stored: _Stored, spec: LowRank) -> _Term:
    a, b, n = stored.read(spec.a), stored.read(spec.b), spec.n_matrices
    a, b = a.view(n, -1, a.shape[1]), b.view(len(b), -1, n).permute(2, 0, 1)
    if spec.transposed:
        a, b = b.mT, a.mT
    return _Term(b.contiguous().flatten(0, 1), a.contiguous(), spec.scale)


def _principal(weights: torch.Tensor, spec: LowRank) -> _Term:
    """The term that PiSSA subtracted from W before training: its r principal components."""
    import torch

    rank = spec.a.entry.shape[0]
    u, s, v = torch.linalg.svd(weights, full_matrices=False)
    return _Term((u[:, :rank] * s[:rank]).contiguous(), v[None, :rank].contiguous(), -1.0)


def _orthogonal(weights: torch.Tensor, spec: LowRank) -> _Term:
    """The term that OLoRA subtracted from W = QR: `scale` times what r columns and rows give.

    It takes W as it is stored, turned or not.
    """
    import torch

    rank = spec.a.entry.shape[0]
    q, r = torch.linalg.qr(weights)
    return _Term(q[:, :rank].contiguous(), r[None, :rank].contiguous(), -spec.scale)


class RowValuesUpdate(AdapterUpdate):
    """The update that replaces rows by others."""

    needs_values = True

    def __init__(
        self, readers: Readers, update: RowValues, known: KnownSegments | None = None
    ) -> None:
        super().__init__(readers, known)
        self._spec = update
        self._order = sorted(range(len(update.rows)), key=update.rows.__getitem__)
        self._values: torch.Tensor | None = None

    def _load(self) -> None:
        self._values = self._stored.read(self._spec.values)

    def _add_to(self, row: torch.Tensor, start_elem: int) -> None:
        assert self._values is not None
        n_cols, rows = self._values.shape[1], self._spec.rows
        edges = (start_elem // n_cols, -(-(start_elem + len(row)) // n_cols))
        first, stop = (bisect_left(self._order, n, key=rows.__getitem__) for n in edges)
        for i in self._order[first:stop]:
            number, value = rows[i], self._values[i]
            a = max(start_elem, number * n_cols)
            b = min(start_elem + len(row), (number + 1) * n_cols)
            if a < b:
                row[a - start_elem : b - start_elem] = value[a - number * n_cols :][: b - a]


class _Stored:
    """Stored tensors as float32, verified where their segments are known."""

    def __init__(self, readers: Readers, known: KnownSegments | None) -> None:
        self._readers, self._segments = readers, known

    def read(self, part: Part) -> torch.Tensor:
        """The whole tensor."""
        ((_, values),) = self._tiles(part, max(1, part.numel))
        return values.view(part.shape)

    def row_tiles(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        """Some rows of a matrix after the other, with the number of the first of them."""
        n_cols = part.shape[1]
        for start, values in self._tiles(part, max(1, _TILE_ELEMS // n_cols) * n_cols):
            yield start // n_cols, values.view(-1, n_cols)

    def _tiles(self, part: Part, length: int) -> Iterator[tuple[int, torch.Tensor]]:
        view = view_of_part(part, part.entry.name)
        segments = self._segments and self._segments.of_part(part)
        verifier = Verifier(view, segments) if segments else None
        check = verifier.check if verifier else None
        for start in range(0, max(1, view.numel), length):
            stop = min(view.numel, start + length)
            raw = np.empty((stop - start) * itemsize(view.dtype), dtype=np.uint8)
            read_stored(self._readers, view, start, stop, raw.data, check)
            yield start, as_float32(raw, view.dtype)
        if verifier:
            verifier.finish()
