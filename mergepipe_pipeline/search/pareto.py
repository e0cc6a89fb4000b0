"""Points of the unit cube and their values: the design, the grid, the front and what it covers.

Every objective is maximised. Points lie on a grid, so that candidates share layers and none is
tried twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, F64Array

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


def design(dims: int, seed: int, count: int) -> F64Array:
    """The first `count` points of a scrambled Sobol sequence, rounded to the grid."""
    from torch import float64
    from torch.quasirandom import SobolEngine

    engine: Any = SobolEngine
    return rounded(engine(dims, scramble=True, seed=seed).draw(count, dtype=float64).numpy())


def diagonal(dims: int, count: int) -> F64Array:
    """`count` points [count, dims] of the grid from corner to corner, each of equal coordinates."""
    return rounded(np.repeat(np.linspace(0.0, 1.0, count)[:, None], dims, axis=1))
