"""Which values are best for some trade-off, where their front has gaps, and what it covers."""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, F64Array
from mergepipe_pipeline.optimise.trials import REFERENCE


def front(values: F64Array) -> BoolArray:
    """Which rows no other row dominates; of equal rows all. Objectives are maximised."""
    at_least = (values[:, None] >= values[None]).all(axis=2)
    better = (values[:, None] > values[None]).any(axis=2)
    dominated = np.any(at_least & better, axis=0)
    return np.asarray(~dominated)


def gaps(values: F64Array) -> tuple[F64Array, F64Array]:
    """Midpoints [g, m] and sizes [g] between neighbours of the front along its first objective."""
    points = np.unique(values[front(values)], axis=0)
    return (points[1:] + points[:-1]) / 2, np.linalg.norm(np.diff(points, axis=0), axis=1)


def hypervolume(values: F64Array, reference: float = REFERENCE) -> float:
    """The volume between `reference`, in each objective, and what the values dominate."""
    above = values[(values > reference).all(axis=1)]
    return _volume(above[front(above)] - reference) if len(above) else 0.0


def _volume(sides: F64Array) -> float:
    """The union of the boxes from the origin to each row: slices along the last objective."""
    if sides.shape[1] == 1:
        return float(sides.max())
    if sides.shape[1] == 2:
        falling = sides[np.argsort(-sides[:, 0])]
        heights = np.maximum.accumulate(falling[:, 1])
        return float((falling[:, 0] * np.diff(heights, prepend=0.0)).sum())
    falling = sides[np.argsort(-sides[:, -1])]
    depths = falling[:, -1] - np.append(falling[1:, -1], 0.0)
    slices = (_volume(falling[: number + 1, :-1]) for number in range(len(falling)))
    return float(sum(depth * area for depth, area in zip(depths, slices, strict=True)))
