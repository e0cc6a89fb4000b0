"""Memory of whole pages that is used again: reads past the page cache go there without a copy."""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.arrays import U8Array
from mergepipe_pipeline.storage.uncached import page_aligned


class PageBuffer:
    """A buffer that grows to the largest need seen and stays. For one thread at a time."""

    def __init__(self) -> None:
        self._all: U8Array = np.empty(0, np.uint8)
        self._used = 0

    def clear(self) -> None:
        """Let everything be used again; what was taken becomes invalid."""
        self._used = 0

    def take(self, nbytes: int) -> U8Array:
        """The next `nbytes`, which are of whole pages; what was taken before stays."""
        if self._used + nbytes > len(self._all):
            # Arrays that were taken keep the smaller buffer until they are gone.
            self._all = np.frombuffer(page_aligned(2 * (self._used + nbytes)), np.uint8)
            self._used = 0
        start, self._used = self._used, self._used + nbytes
        return self._all[start : self._used]
