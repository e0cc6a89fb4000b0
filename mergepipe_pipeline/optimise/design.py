"""Points that a search starts with: some fill the unit cube evenly, some have one value for all."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.optimise.grid import rounded


def design(dims: int, seed: int, count: int) -> F64Array:
    """The first `count` points of a scrambled Sobol sequence, rounded to the grid."""
    from torch import float64
    from torch.quasirandom import SobolEngine

    engine: Any = SobolEngine
    return rounded(engine(dims, scramble=True, seed=seed).draw(count, dtype=float64).numpy())


def diagonal(dims: int, count: int) -> F64Array:
    """`count` points [count, dims] of the grid from corner to corner, each of equal coordinates."""
    return rounded(np.repeat(np.linspace(0.0, 1.0, count)[:, None], dims, axis=1))
