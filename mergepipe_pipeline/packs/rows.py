"""One input's part of a window: bytes first, arithmetic later, perhaps in another thread.

Only here a full checkpoint, a delta, an adapter, a re-indexed embedding or a part of a pack turns
into δ or T. Where an element is not read, the expert equals the base.

Rows may lie on another device than the bytes. Then the bytes are copied there as stored, are
widened there, and must stay until the device is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mergepipe_pipeline.arrays import U8Array, U16Array
from mergepipe_pipeline.checkpoints.low_rank import AdapterUpdate
from mergepipe_pipeline.checkpoints.stored import Readers, Verify, read_stored, typed
from mergepipe_pipeline.domain.blocks import Range, clip, coalesce
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CorruptionError, DamagedPackError

if TYPE_CHECKING:
    import torch

    from mergepipe_pipeline.packs.elements import PackedPart
    from mergepipe_pipeline.storage.read_batch import ReadBatch


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
        buffer: U8Array,
        update: AdapterUpdate | None,
        verify: Verify | None = None,
    ) -> None:
        self._readers, self._view, self._read = readers, view, read
        self._verify = verify
        self._itemsize = itemsize(view.dtype)
        self._raw = buffer
        self._update = update if read else None
        self._start = 0
        self._parts: tuple[Range, ...] = ()
        self._approximate: list[PackedPart] = []

    def fetch(
        self,
        start_elem: int,
        stop_elem: int,
        packed: Sequence[PackedPart] = (),
        base: U8Array | None = None,
        batch: ReadBatch | None = None,
    ) -> None:
        """Read what is allowed of [start, stop) into the row's buffer, with a `batch` if there is.

        `packed` are the parts that a pack gives; `base` are the base's stored bytes there, from
        which a pack's bits are decoded.
        """
        self._start = start_elem
        if self._update:
            self._update.load()
        if not self._view.stored:
            return
        stop_elem = min(stop_elem, self._view.numel)
        parts = list(clip(self._read, start_elem, stop_elem))
        for a, b in parts:
            out = self._bytes(a, b).data
            read_stored(self._readers, self._view, a, b, out, self._verify, batch)
        for part in packed:
            if part.gives_bits:
                assert base is not None
                a, b = part.start_elem, part.stop_elem
                unpacked = self._bytes(a, b)
                part.fill(unpacked.data, self._bytes(a, b, base).data)
                verify_part(part, unpacked, self._verify)
                parts.append((a, b))
            else:
                self._approximate.append(part)
        self._parts = coalesce(parts)

    def delta(self, row: torch.Tensor, base: torch.Tensor | None) -> None:
        """Fill `row` [n] with δ or δ̂: T − B where read, the stored Δ, plus the update; else 0."""
        if not self._is_whole(row):
            row.zero_()
        for a, b in self._parts:
            part = row[a - self._start : b - self._start]
            part.copy_(typed(self._bytes(a, b), self._view.dtype), non_blocking=True)
            if not self._view.is_delta:
                assert base is not None
                part.sub_(base[a - self._start : b - self._start])
        self._add_approximate(row)
        if self._update:
            inside = self._inside(row)
            if not self._update.needs_values:
                self._update.add_to(inside, self._start)
                return
            assert base is not None
            inside.add_(base[: len(inside)])
            self._update.add_to(inside, self._start)
            inside.sub_(base[: len(inside)])

    def value(self, row: torch.Tensor, base: torch.Tensor | None) -> None:
        """Fill `row` [n] with T where read, else B; then add approximated and low-rank δ."""
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
        self._add_approximate(row)
        if self._update:
            self._update.add_to(self._inside(row), self._start)

    def bits(self, base: U16Array) -> U16Array | None:
        """The window's elements as bits of bfloat16, the base's where nothing was read.

        `base` [n] is all of the window. None where T is not stored so, or is approximated.
        """
        is_plain = self._view.dtype == "BF16" and not self._view.is_delta
        if not is_plain or self._update or self._approximate:
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

    def _add_approximate(self, row: torch.Tensor) -> None:
        import torch

        for part in self._approximate:
            into = row[part.start_elem - self._start : part.stop_elem - self._start]
            delta = np.empty(len(into), np.float32)
            part.delta(delta)
            into.add_(torch.from_numpy(delta).to(into.device))

    def _bytes(self, a: int, b: int, of: U8Array | None = None) -> U8Array:
        """The bytes of elements [a, b) in the row's buffer, or in another one of the window."""
        raw, size = self._raw if of is None else of, self._itemsize
        return raw[(a - self._start) * size : (b - self._start) * size]


def verify_part(part: PackedPart, out: U8Array, verify: Verify | None) -> None:
    """Verify what a part gave, where all of it is the expert's. Raises DamagedPackError."""
    if not verify or not part.is_expert:
        return
    try:
        verify(part.start_elem, part.stop_elem, out.data)
    except CorruptionError as error:
        raise DamagedPackError(
            "A pack does not give its expert's bytes",
            pack_id=Path(part.root).name,
            where=f"{part.root}, for {error.where}",
            expected=error.expected,
            found=error.found,
        ) from error


class BaseRow:
    """The base's part of a window; `buffer` holds one window of it."""

    def __init__(
        self,
        readers: Readers,
        view: TensorView,
        buffer: U8Array,
        update: AdapterUpdate | None,
        verify: Verify | None = None,
    ) -> None:
        self._readers, self._view, self._verify = readers, view, verify
        self._buffer = buffer
        self._update = update
        self._start = self._n = 0

    def fetch(self, start_elem: int, stop_elem: int, batch: ReadBatch | None = None) -> None:
        """Read [start, stop) of the base, with a `batch` if there is one."""
        self._start, self._n = start_elem, stop_elem - start_elem
        if self._update:
            self._update.load()
        raw = self.raw.data
        read_stored(self._readers, self._view, start_elem, stop_elem, raw, self._verify, batch)

    @property
    def raw(self) -> U8Array:
        """The fetched bytes as stored."""
        return self._buffer[: self._n * itemsize(self._view.dtype)]

    @property
    def bits(self) -> U16Array | None:
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
