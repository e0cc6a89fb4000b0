"""The memory of a merge, allocated once and used again for each window.

Fresh pages cost more than the arithmetic on them, so a worker's buffers grow to the
largest need seen and stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mergepipe_pipeline.arrays import F32Array, U8Array

if TYPE_CHECKING:
    import torch

_ALIGN = 64


class BufferPool:
    """The buffers of the window that a worker is on: its inputs as stored, float32 rows."""

    def __init__(self) -> None:
        self._bytes: U8Array = np.empty(0, dtype=np.uint8)
        self._used = 0
        self._flat = np.empty(0, dtype=np.float32)

    def clear(self, nbytes: int, pieces: int) -> None:
        """Make room for `pieces` pieces of `nbytes` together; what lay here becomes invalid."""
        need = nbytes + pieces * _ALIGN
        if need > len(self._bytes):
            self._bytes = self._allocated(need)
        self._used = 0

    def take(self, nbytes: int) -> U8Array:
        """The next `nbytes` bytes, aligned for any element type."""
        start = self._used
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        return self._bytes[start : start + nbytes]

    def floats(self, k: int, n: int) -> F32Array:
        """An uninitialised [k, n] float32 matrix; the one handed out before becomes invalid."""
        if k * n > len(self._flat):
            self._flat = np.empty(k * n, dtype=np.float32)
        return self._flat[: k * n].reshape(k, n)

    def rows(self, k: int, n: int) -> torch.Tensor:
        """`floats` for torch."""
        import torch

        return torch.from_numpy(self.floats(k, n))

    def _allocated(self, nbytes: int) -> U8Array:
        return np.empty(nbytes, dtype=np.uint8)
