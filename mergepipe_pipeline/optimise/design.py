"""Points that fill the unit cube evenly: where every search starts."""

from __future__ import annotations

from typing import Any

from mergepipe_pipeline.optimise.grid import rounded
from mergepipe_pipeline.optimise.trials import Array


def design(dims: int, seed: int, count: int) -> Array:
    """The first `count` points of a scrambled Sobol sequence, rounded to the grid."""
    from torch import float64
    from torch.quasirandom import SobolEngine

    engine: Any = SobolEngine
    return rounded(engine(dims, scramble=True, seed=seed).draw(count, dtype=float64).numpy())
