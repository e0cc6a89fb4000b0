"""From bytes to float32 rows: how each kind of input becomes what an operator works on.

Full checkpoints are the one expert format so far; another one is another class with `fill`. What an
unread block means is decided here: the expert equals the base there.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mergepipe_pipeline.dtypes import TORCH_NAME, itemsize
from mergepipe_pipeline.spec.blocks import clip
from mergepipe_pipeline.spec.checkpoint import TensorEntry
from mergepipe_pipeline.spec.operator import Space
from mergepipe_pipeline.spec.plan import ExpertInput
from mergepipe_pipeline.storage.reader import BlockReader

Bytes = npt.NDArray[np.uint8]


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype of a safetensors code."""
    dtype = getattr(torch, TORCH_NAME[code])
    assert isinstance(dtype, torch.dtype)
    return dtype


def as_float32(raw: Bytes, dtype: str) -> torch.Tensor:
    """[n] float32 from the little-endian bytes of n elements of `dtype`."""
    return torch.from_numpy(raw).view(torch_dtype(dtype)).to(torch.float32)


def to_bytes(values: torch.Tensor, dtype: str) -> Bytes:
    """The bytes of [n] float32 values cast once, to nearest even, to `dtype`."""
    cast = values.to(torch_dtype(dtype))
    if cast is values:  # the caller reuses its rows while these bytes are still being written
        cast = values.clone()
    out: Bytes = cast.view(torch.uint8).numpy()
    return out


class ExpertRow(Protocol):
    """One expert's part of a window: bytes fetched first, arithmetic later, in another thread."""

    def fetch(self, start_elem: int, stop_elem: int) -> None:
        """Read what the plan allows of [start, stop)."""
        ...

    def fill(self, row: torch.Tensor, base: torch.Tensor | None, space: Space) -> None:
        """Write [n] float32 into `row`: δ or T, and what an unread element means."""
        ...


class FullCheckpointRow:
    """A row of an expert that stores whole weights T; `buffer` holds one window of them."""

    def __init__(self, reader: BlockReader, entry: ExpertInput, buffer: Bytes) -> None:
        self._reader = reader
        self._input = entry
        self._itemsize = itemsize(entry.tensor.dtype)
        self._raw = buffer
        self._start = 0
        self._parts: tuple[tuple[int, int], ...] = ()

    def fetch(self, start_elem: int, stop_elem: int) -> None:
        """Read the planned parts of [start, stop) into the row's own buffer."""
        self._start = start_elem
        self._parts = tuple(clip(self._input.read, start_elem, stop_elem))
        view = self._raw.data
        for a, b in self._parts:
            at = (a - start_elem) * self._itemsize
            out = view[at : at + (b - a) * self._itemsize]
            self._reader.read_into(self._input.tensor, a, b, out)

    def fill(self, row: torch.Tensor, base: torch.Tensor | None, space: Space) -> None:
        """δ = T − B where read and 0 elsewhere, or T where read and B elsewhere."""
        n = len(row)
        whole = self._parts == ((self._start, self._start + n),)
        if not whole:
            if space == "delta":
                row.zero_()
            else:
                assert base is not None
                row.copy_(base)
        for a, b in self._parts:
            i, j = a - self._start, b - self._start
            raw = self._raw[i * self._itemsize : j * self._itemsize]
            part = row[i:j]
            part.copy_(torch.from_numpy(raw).view(torch_dtype(self._input.tensor.dtype)))
            if space == "delta":
                assert base is not None
                part.sub_(base[i:j])


class BaseRow:
    """The base's part of a window; `buffer` holds one window of it."""

    def __init__(self, reader: BlockReader, tensor: TensorEntry, buffer: Bytes) -> None:
        self._reader = reader
        self._tensor = tensor
        self._itemsize = itemsize(tensor.dtype)
        self._buffer = buffer
        self._n = 0

    def fetch(self, start_elem: int, stop_elem: int) -> None:
        """Read [start, stop) of the base."""
        self._n = stop_elem - start_elem
        view = self._buffer.data[: self._n * self._itemsize]
        self._reader.read_into(self._tensor, start_elem, stop_elem, view)

    @property
    def raw(self) -> Bytes:
        """The fetched bytes as stored."""
        return self._buffer[: self._n * self._itemsize]

    def values(self) -> torch.Tensor:
        """[n] float32 of what was fetched."""
        return as_float32(self.raw, self._tensor.dtype)
