"""The memory of a merge, allocated once and carved anew for each window.

One slab of bytes per window in flight, one of float32 for the rows an operator works on. Fresh
pages cost more than the arithmetic on them, so slabs grow to the largest need seen and stay.
"""

from __future__ import annotations

import numpy as np
import torch

from mergepipe_pipeline.engine.delta import Bytes

_ALIGN = 64


class Slab:
    """A growing byte buffer handed out in aligned pieces; `reset` takes all pieces back."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, dtype=np.uint8)
        self._used = 0

    def reset(self, nbytes: int, pieces: int) -> None:
        """Make room for `pieces` pieces of `nbytes` together; earlier pieces become invalid."""
        need = nbytes + pieces * _ALIGN
        if need > len(self._bytes):
            self._bytes = np.empty(need, dtype=np.uint8)
        self._used = 0

    def take(self, nbytes: int) -> Bytes:
        """The next `nbytes` bytes, aligned for any element type."""
        start = self._used
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        return self._bytes[start : start + nbytes]


class Rows:
    """The [K, n] float32 matrix of the window being merged."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def take(self, k: int, n: int) -> torch.Tensor:
        """An uninitialised [k, n] float32 view; the one handed out before becomes invalid."""
        if k * n > self._flat.numel():
            self._flat = torch.empty(k * n)
        return self._flat[: k * n].view(k, n)
