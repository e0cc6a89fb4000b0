"""What a search has tried: points of the unit cube and what they were worth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

#: A failure's value in every objective, and from where hypervolume counts.
REFERENCE = -0.2


@dataclass(frozen=True, slots=True)
class Trials:
    """Points tried, [n, d] in 0 to 1, and their values, [n, m].

    Every objective is maximised, 0 to 1 between its anchors. A failure has REFERENCE everywhere.
    """

    points: Array
    values: Array

    def __len__(self) -> int:
        return len(self.points)
