"""The memory of a merge, allocated once and used again for each window.

Fresh pages cost more than the arithmetic on them, so a desk grows to the largest need seen and
stays.
"""

from __future__ import annotations

import numpy as np
import torch

from mergepipe_pipeline.tensors.stored import Bytes

_ALIGN = 64


class Desk:
    """The buffers of one window in flight: stored bytes of its inputs, float32 rows to work on."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, dtype=np.uint8)
        self._used = 0
        self._flat = torch.empty(0)

    def clear(self, nbytes: int, pieces: int) -> None:
        """Make room for `pieces` pieces of `nbytes` together; what lay here becomes invalid."""
        need = nbytes + pieces * _ALIGN
        if need > len(self._bytes):
            self._bytes = np.empty(need, dtype=np.uint8)
        self._used = 0

    def take(self, nbytes: int) -> Bytes:
        """The next `nbytes` bytes, aligned for any element type."""
        start = self._used
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        return self._bytes[start : start + nbytes]

    def rows(self, k: int, n: int) -> torch.Tensor:
        """An uninitialised [k, n] float32 matrix; the one handed out before becomes invalid."""
        if k * n > self._flat.numel():
            self._flat = torch.empty(k * n)
        return self._flat[: k * n].view(k, n)
