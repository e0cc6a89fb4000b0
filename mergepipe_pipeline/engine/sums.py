"""The mean of a tensor by its exact sums: of all models, or of kept ones and what changed since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.operators.steps.exact import Sums, mean_of
from mergepipe_pipeline.storage.sums import SumsLostError, SumsReader, pieces_of


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
        n_read = 0
        if self.kept is None:
            mean, sums = mean_of(rows)
        else:
            stop_elem = start_elem + rows.shape[1]
            high, low, n_read = self.kept.read(tensor, start_elem, stop_elem)
            sums = Sums(high, low, np.zeros(len(high)))
            sums.add(rows, self.signs)
            if not sums.exact.all():
                raise SumsLostError(f"{tensor}: the sum of other models has too many digits")
            mean = sums.mean(self.count)
        is_exact = bool(sums.exact.all())
        pieces = pieces_of(start_elem, sums.high, sums.low) if is_exact else None
        return WindowSums(mean, pieces, n_read)
