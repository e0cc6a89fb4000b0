"""One input's part of a window: bytes first, arithmetic later, perhaps in another thread.

Rows may lie on another device than the bytes. Then the bytes go there as they are stored, are
widened there, and must stay until that device has come so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.spec.blocks import Range, clip
from mergepipe_pipeline.spec.view import TensorView
from mergepipe_pipeline.tensors.low_rank import LowRankUpdate
from mergepipe_pipeline.tensors.stored import Bytes, Readers, read_stored, typed
from mergepipe_pipeline.tensors.verified import Verify

if TYPE_CHECKING:
    import torch


class ExpertRow:
    """A row of an expert: `read` are the element ranges that may be fetched.

    `buffer` holds one window of stored bytes; `update` is shared by all windows of the
    tensor, `verify` is given what is read.
    """

    def __init__(
        self,
        readers: Readers,
        view: TensorView,
        read: Sequence[Range],
        buffer: Bytes,
        update: LowRankUpdate | None,
        verify: Verify | None = None,
    ) -> None:
        self._readers, self._view, self._read = readers, view, read
        self._verify = verify
        self._itemsize = itemsize(view.dtype)
        self._raw = buffer
        self._update = update if read else None
        self._start = 0
        self._parts: tuple[Range, ...] = ()

    def fetch(self, start_elem: int, stop_elem: int) -> None:
        """Read what is allowed of [start, stop) into the row's buffer."""
        self._start = start_elem
        if self._update:
            self._update.load()
        if not self._view.stored:
            return
        self._parts = tuple(clip(self._read, start_elem, min(stop_elem, self._view.numel)))
        for a, b in self._parts:
            read_stored(self._readers, self._view, a, b, self._bytes(a, b).data, self._verify)

    def delta(self, row: torch.Tensor, base: torch.Tensor | None) -> None:
        """Fill `row` [n] with δ: T − B where read, the stored Δ, plus the update; 0 elsewhere."""
        if not self._is_whole(row):
            row.zero_()
        for a, b in self._parts:
            part = row[a - self._start : b - self._start]
            part.copy_(typed(self._bytes(a, b), self._view.dtype), non_blocking=True)
            if not self._view.is_delta:
                assert base is not None
                part.sub_(base[a - self._start : b - self._start])
        if self._update:
            self._update.add_to(self._inside(row), self._start)

    def value(self, row: torch.Tensor, base: torch.Tensor | None) -> None:
        """Fill `row` [n] with T where read, with B (and what is on top of it) elsewhere."""
        if self._view.is_delta or not self._is_whole(row):
            assert base is not None
            row.copy_(base)
        for a, b in self._parts:
            part = row[a - self._start : b - self._start]
            stored = typed(self._bytes(a, b), self._view.dtype)
            if self._view.is_delta:
                part.add_(stored.to(part.device, non_blocking=True).float())
            else:
                part.copy_(stored, non_blocking=True)
        if self._update:
            self._update.add_to(self._inside(row), self._start)

    def bits(self, base: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16] | None:
        """The window's elements as bits of bfloat16, the base's where nothing was read.

        `base` [n] is all of the window. None where T is not stored so.
        """
        if self._view.dtype != "BF16" or self._update or self._view.is_delta:
            return None
        bits = self._bytes(self._start, self._start + len(base)).view(np.uint16)
        at = 0
        for a, b in (*self._parts, (self._start + len(base),) * 2):
            bits[at : a - self._start] = base[at : a - self._start]
            at = b - self._start
        return bits

    def _is_whole(self, row: torch.Tensor) -> bool:
        return self._parts == ((self._start, self._start + len(row)),)

    def _inside(self, row: torch.Tensor) -> torch.Tensor:
        """The part of `row` before the view's end."""
        return row[: max(0, self._view.numel - self._start)]

    def _bytes(self, a: int, b: int) -> Bytes:
        return self._raw[(a - self._start) * self._itemsize : (b - self._start) * self._itemsize]


class BaseRow:
    """The base's part of a window; `buffer` holds one window of it."""

    def __init__(
        self,
        readers: Readers,
        view: TensorView,
        buffer: Bytes,
        update: LowRankUpdate | None,
        verify: Verify | None = None,
    ) -> None:
        self._readers, self._view, self._verify = readers, view, verify
        self._buffer = buffer
        self._update = update
        self._start = self._n = 0

    def fetch(self, start_elem: int, stop_elem: int) -> None:
        """Read [start, stop) of the base."""
        self._start, self._n = start_elem, stop_elem - start_elem
        if self._update:
            self._update.load()
        raw = self.raw.data
        read_stored(self._readers, self._view, start_elem, stop_elem, raw, self._verify)

    @property
    def raw(self) -> Bytes:
        """The fetched bytes as stored."""
        return self._buffer[: self._n * itemsize(self._view.dtype)]

    @property
    def bits(self) -> npt.NDArray[np.uint16] | None:
        """The fetched elements as bits of bfloat16, where they are stored so and are all."""
        is_plain = self._view.dtype == "BF16" and self._update is None
        return self.raw.view(np.uint16) if is_plain else None

    def values(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n] float32 of what was fetched, with the low-rank update if there is one.

        Written into `out` if given; else it may share memory with the bytes.
        """
        stored = typed(self.raw, self._view.dtype)
        if out is not None:
            values = out.copy_(stored, non_blocking=True)
        else:
            values = stored.float()
            if self._update and values is stored:
                values = values.clone()
        if self._update:
            self._update.add_to(values, self._start)
        return values
