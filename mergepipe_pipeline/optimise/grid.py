"""The grid on which points lie, so that candidates share layers and none is tried twice."""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.arrays import F64Array

#: Steps from 0 to 1.
STEPS = 64


def rounded(points: F64Array) -> F64Array:
    """The nearest points of the grid, within the unit cube."""
    return np.round(np.clip(points, 0.0, 1.0) * STEPS) / STEPS


def fresh(points: F64Array, *taken: F64Array) -> F64Array:
    """The points of a grid that are not taken and come no second time, in their order."""
    seen = {row.tobytes() for rows in taken for row in np.round(rows * STEPS).astype(np.int64)}
    kept = list[int]()
    for number, row in enumerate(np.round(points * STEPS).astype(np.int64)):
        if (key := row.tobytes()) not in seen:
            seen.add(key)
            kept.append(number)
    return points[kept]
