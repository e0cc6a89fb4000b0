"""What the product's search is compared with: rounds, NSGA-II, and a design that learns nothing.

- `Rounds`: qNEHVI alone, proposed at once when nothing is pending.
- `Evolution`: NSGA-II, steady state: children of the best points known, one at a time. Its
  population is what is known: the best by rank of front, then by distance to neighbours on it.
"""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.arrays import F64Array, I64Array
from mergepipe_pipeline.search.bayes import Candidates, Proposer, fitted, maxima
from mergepipe_pipeline.search.pareto import Trials, front

#: How alike children are to their parents, as the field has it.
_CROSSOVER_INDEX, _MUTATION_INDEX = 15, 20
_CROSSOVER_SHARE = 0.9
#: Parents of NSGA-II, and children drawn so that one is new.
_POPULATION, _CHILDREN = 16, 8


class Rounds(Proposer):
    """Rounds of points; none is given while any is pending."""

    def propose(self, trials: Trials, pending: F64Array, count: int) -> F64Array:
        return pending[:0] if len(pending) else super().propose(trials, pending, count)

    def candidates(self, trials: Trials) -> Candidates:
        import torch

        torch.manual_seed(self.seed_of(len(trials)))
        model = fitted(trials, self.length_scales)

        def best(pending: F64Array, seed: int) -> F64Array:
            torch.manual_seed(seed)
            points, gains, _ = maxima(model, trials, pending, seed)
            return points[np.argsort(-gains, kind="stable")]

        return best


class Evolution(Proposer):
    """Children of the best trials."""

    def candidates(self, trials: Trials) -> Candidates:
        return lambda pending, seed: children(
            trials, _POPULATION, _CHILDREN, np.random.default_rng(seed)
        )


def children(trials: Trials, population: int, count: int, random: np.random.Generator) -> F64Array:
    """`count` children of the best `population` trials, [count, d] in the unit cube."""
    fit = fittest(trials.values, population)
    # Of two drawn, the one that comes first in `fit` is a parent.
    first, second = (
        trials.points[fit[random.integers(len(fit), size=(2, count)).min(axis=0)]] for _ in range(2)
    )
    return np.clip(_mutated(_crossed(first, second, random), random), 0.0, 1.0)


def fittest(values: F64Array, count: int) -> I64Array:
    """The best `count` rows: front by front, and within one the loneliest first."""
    order, left = list[int](), np.arange(len(values))
    while len(left) and len(order) < count:
        ahead = front(values[left])
        level = left[ahead]
        order += level[np.argsort(-_crowding(values[level]), kind="stable")].tolist()
        left = left[~ahead]
    return np.array(order[:count], dtype=np.int64)


def _crowding(values: F64Array) -> F64Array:
    """How far the neighbours on the front are from each other; infinite at its ends."""
    distance = np.zeros(len(values))
    for column in values.T:
        order = np.argsort(column, kind="stable")
        spread = np.ptp(column) or 1.0
        distance[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / spread
        distance[order[[0, -1]]] = np.inf
    return distance


def _crossed(first: F64Array, second: F64Array, random: np.random.Generator) -> F64Array:
    """Simulated binary crossover: between and beyond two parents, dimension by dimension."""
    u = random.random(first.shape)
    exponent = 1 / (_CROSSOVER_INDEX + 1)
    spread = np.where(u < 0.5, (2 * u) ** exponent, (2 - 2 * u) ** -exponent)
    spread *= random.choice((-1.0, 1.0), first.shape)
    mixes = random.random(first.shape) < 0.5
    mixes &= random.random((len(first), 1)) < _CROSSOVER_SHARE
    return np.where(mixes, (first + second + spread * (first - second)) / 2, first)


def _mutated(points: F64Array, random: np.random.Generator) -> F64Array:
    """Polynomial mutation of one dimension in the mean."""
    u = random.random(points.shape)
    exponent = 1 / (_MUTATION_INDEX + 1)
    step = np.where(u < 0.5, (2 * u) ** exponent - 1, 1 - (2 - 2 * u) ** exponent)
    return np.where(random.random(points.shape) < 1 / points.shape[1], points + step, points)
