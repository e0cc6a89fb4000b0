"""Low-rank updates δ = scale · b·a in runs of elements, without ever holding the whole product.

Products are taken in tiles of whole rows whose place depends on the tensor's shape alone, so that
an element has the same bits whatever run of elements is asked for.
Source: LoRA (https://arxiv.org/abs/2106.09685) as PEFT stores it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from mergepipe_pipeline.spec.segments import KnownSegments
from mergepipe_pipeline.spec.view import LowRank, Part, view_of
from mergepipe_pipeline.tensors.stored import Readers, as_float32, read_stored
from mergepipe_pipeline.tensors.verified import Verifier

if TYPE_CHECKING:
    import torch

#: About this many elements of the product are computed at once.
_TILE_ELEMS = 1 << 16


class LowRankUpdate:
    """The update of one tensor; factors are read once, when first needed. Safe for threads.

    With `known` segments the factors' bytes are verified.
    """

    def __init__(
        self, readers: Readers, low_rank: LowRank, known: KnownSegments | None = None
    ) -> None:
        self._readers, self._known = readers, known
        self._spec = low_rank
        self._lock = threading.Lock()
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None

    def load(self) -> None:
        """Read both factors, in one ranged read each."""
        with self._lock:
            if self._factors is None:
                a, b = self._read(self._spec.a), self._read(self._spec.b)
                if self._spec.transposed:
                    self._factors = (a.t().contiguous(), b.t().contiguous())
                else:
                    self._factors = (b, a)

    def add_to(self, row: torch.Tensor, start_elem: int) -> None:
        """Add elements [start, start + n) of the update to `row`, float32 [n] on any device.

        The product is made here: every library of matrix products adds up in its own order.
        """
        self.load()
        assert self._factors is not None
        left, right = self._factors
        n_cols = right.shape[1]
        tile_rows = max(1, _TILE_ELEMS // n_cols)
        stop_elem = start_elem + len(row)
        first = start_elem // n_cols // tile_rows * tile_rows
        for r in range(first, -(-stop_elem // n_cols), tile_rows):
            tile = (left[r : r + tile_rows] @ right).mul_(self._spec.scale).view(-1)
            at = r * n_cols
            a, b = max(start_elem, at), min(stop_elem, at + len(tile))
            row[a - start_elem : b - start_elem].add_(tile[a - at : b - at].to(row.device))

    def _read(self, part: Part) -> torch.Tensor:
        entry = part.entry
        raw = np.empty(entry.nbytes, dtype=np.uint8)
        view = view_of(entry, part.source)
        known = self._known and self._known.of_part(part)
        verifier = Verifier(view, known) if known else None
        read_stored(
            self._readers, view, 0, entry.numel, raw.data, verifier.check if verifier else None
        )
        if verifier:
            verifier.finish()
        return as_float32(raw, entry.dtype).view(entry.shape)
