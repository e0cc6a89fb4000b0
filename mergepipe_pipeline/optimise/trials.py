"""What a search has tried: points of the unit cube and what they were worth."""

from __future__ import annotations

from dataclasses import dataclass

from mergepipe_pipeline.arrays import F64Array

#: A failure's value in every objective, and from where hypervolume counts.
REFERENCE = -0.2


@dataclass(frozen=True, slots=True)
class Trials:
    """Points tried, [n, d] in 0 to 1, and their values, [n, m].

    Every objective is maximised, 0 to 1 between its anchors. A failure has REFERENCE everywhere.
    """

    points: F64Array
    values: F64Array

    def __len__(self) -> int:
        return len(self.points)
