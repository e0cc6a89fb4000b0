"""Problems with a known front, as searches see them: two objectives, maximised between anchors.

Few of a problem's dimensions may be active: then the others change nothing, and a prior can name
those that do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.search.pareto import REFERENCE


@dataclass(frozen=True, slots=True)
class Problem:
    """DTLZ2, whose best points lie in the middle, or anywhere (`dtlz2-any`), or ZDT1.

    An objective is worth 1 where it is 0, and 0 at its anchor.

    The anchor is what an objective is at the end of the front of a design drawn at random. Active
    dimensions, and what is best anywhere, are drawn from `seed`.
    """

    name: str
    dims: int
    active: int

    def which(self, seed: int) -> np.ndarray:
        """The active dimensions, of which the first decides the place on the front."""
        return np.random.default_rng((seed, self.dims)).permutation(self.dims)[: self.active]

    def scores(self, seed: int) -> F64Array:
        """What a prior would say that knows the active dimensions."""
        return np.isin(np.arange(self.dims), self.which(seed)).astype(float)

    def values(self, points: F64Array, seed: int) -> F64Array:
        """Values [n, 2] of points [n, dims]."""
        x = points[:, self.which(seed)]
        found = _zdt1(x) if self.name == "zdt1" else _dtlz2(x, self._best(seed))
        return 1 - found / self._anchors()

    def _best(self, seed: int) -> F64Array:
        """Where each active dimension of DTLZ2 but the first is best."""
        if self.name == "dtlz2":
            return np.full(self.active - 1, 0.5)
        return np.random.default_rng((seed, self.dims, 1)).random(self.active - 1)

    def most(self) -> float:
        """The hypervolume of the front itself."""
        beyond = 1 / 3 if self.name == "zdt1" else np.pi / 4
        return float((1 - REFERENCE) ** 2 - beyond / np.prod(self._anchors()))

    def _anchors(self) -> F64Array:
        if self.name == "zdt1":
            return np.array([1.0, 5.5])
        # The mean square of two numbers' distance: from the middle, or from anywhere.
        square = 1 / 12 if self.name == "dtlz2" else 1 / 6
        return np.full(2, 1 + (self.active - 1) * square)


def _dtlz2(x: F64Array, best: F64Array) -> F64Array:
    g = 1 + ((x[:, 1:] - best) ** 2).sum(axis=1)
    angle = x[:, 0] * np.pi / 2
    return np.stack([g * np.cos(angle), g * np.sin(angle)], axis=1)


def _zdt1(x: F64Array) -> F64Array:
    g = 1 + 9 * x[:, 1:].mean(axis=1)
    return np.stack([x[:, 0], g * (1 - np.sqrt(x[:, 0] / g))], axis=1)
