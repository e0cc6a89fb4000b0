"""The mean of a tensor by its exact sums: of all models, or of kept ones and what changed since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.operators.steps.exact import Sums, mean_of
from mergepipe_pipeline.storage.sums import SumsLostError, SumsReader, packed, piece_ends


@dataclass(frozen=True, slots=True)
class WindowSums:
    """What a window's sums give: the mean, the pieces to keep, the bytes of kept ones read.

    `pieces` are None where some sum is not exact.
    """

    mean: F32Array
    pieces: list[tuple[int, bytes]] | None
    n_read: int


@dataclass(frozen=True, slots=True)
class TensorSums:
    """How the sums of one tensor over `count` models come about: from `kept` ones, if there are.

    They are those of the models of `plan_id`. The task's experts are added to what is kept or taken
    away, as `signs` say.
    """

    plan_id: str
    count: int
    signs: Sequence[int] = ()
    kept: SumsReader | None = None

    def of(self, tensor: str, rows: F32Array, start_elem: int) -> WindowSums:
        """The sums of a window of `rows` [K, n]. Raises SumsLostError."""
        stop_elem, n_read = start_elem + rows.shape[1], 0
        if self.kept is not None:
            high, low, n_read = self.kept.read(tensor, start_elem, stop_elem)
        mean = np.empty(rows.shape[1], np.float32)
        pieces: list[tuple[int, bytes]] = []
        # One piece after the other: its sums stay in the nearest caches.
        for first, stop in pairwise(piece_ends(start_elem, stop_elem)):
            if self.kept is None:
                mean[first:stop], sums = mean_of(rows, first, stop)
            else:
                sums = Sums(high[first:stop], low[first:stop], np.zeros(stop - first))
                sums.add(rows, self.signs, first)
                if not sums.exact.all():
                    raise SumsLostError(f"{tensor}: the sum of other models has too many digits")
                mean[first:stop] = sums.mean(self.count)
            if sums.exact.all():
                pieces.append((stop - first, packed(sums.high, sums.low)))
        is_exact = sum(n for n, _ in pieces) == len(mean)
        return WindowSums(mean, pieces if is_exact else None, n_read)
