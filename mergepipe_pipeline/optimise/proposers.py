"""Which points to try next, by four methods, each a pure function of what is known.

- `async`: AP-BMM (arXiv 2512.09972). Each point is the best one given those that are pending.
- `sync`: rounds of qNEHVI. A round is proposed at once, when nothing is pending.
- `nsga2`: children of the best trials.
- `sobol`: the design alone, which looks at no value.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.optimise.design import design
from mergepipe_pipeline.optimise.evolution import children
from mergepipe_pipeline.optimise.grid import fresh, rounded
from mergepipe_pipeline.optimise.surrogate import Prior
from mergepipe_pipeline.optimise.trials import Trials

Method = Literal["async", "sync", "nsga2", "sobol"]
#: From pending points and a seed to candidates, best first.
Candidates = Callable[[F64Array, int], F64Array]

#: Parents of NSGA-II, and children drawn so that one is new.
_POPULATION, _CHILDREN = 16, 8


class Proposer(Protocol):
    """Says where to evaluate next."""

    def propose(self, trials: Trials, pending: F64Array, count: int) -> F64Array:
        """Up to `count` points of the grid, [count, d], neither known nor pending.

        The same arguments and seed give the same points in every process. `sync` gives none while
        points are pending. All give fewer where the grid is used up.
        """
        ...


def proposer(
    method: Method,
    *,
    dims: int,
    objectives: int,
    seed: int,
    initial: int,
    length_scales: F64Array | None = None,
    prior: Prior = "map",
    begin: F64Array | None = None,
) -> Proposer:
    """The proposer of a method for a cube of `dims` dimensions and two objectives or more.

    The first `initial` points are those of `begin`, then of the design. `length_scales`: what is
    expected of dimensions, by `prior`; without, nothing is. Raises MergePipeError where a package
    is not installed.
    """
    if method in ("async", "sync"):
        _refuse_without_botorch(method)
    begin = np.empty((0, dims)) if begin is None else begin
    return _Proposer(method, dims, objectives, seed, initial, length_scales, prior, begin)


@dataclass(frozen=True, slots=True)
class _Proposer:
    """One point after the other, each given those before it."""

    method: Method
    dims: int
    objectives: int
    seed: int
    initial: int
    length_scales: F64Array | None
    prior: Prior
    begin: F64Array

    def propose(self, trials: Trials, pending: F64Array, count: int) -> F64Array:
        taken = pending.reshape(-1, self.dims)
        if self.method == "sync" and len(taken):
            return taken[:0]
        first = len(trials) + len(taken)
        even = design(self.dims, self.seed, 2 * (first + count) + 64)
        spare = np.concatenate([self.begin, even])
        candidates: Candidates | None = None
        with _repeatable():
            for number in range(first, first + count):
                points = spare
                if number >= self.initial and len(trials) > 1:
                    candidates = candidates or self._candidates(trials)
                    chosen = rounded(candidates(taken, self._seed(number)))
                    points = np.concatenate([chosen, spare])
                new = fresh(points, trials.points, taken)[:1]
                if not len(new):
                    break
                taken = np.concatenate([taken, new])
        return taken[len(pending) :]

    def _candidates(self, trials: Trials) -> Candidates:
        """What the method would try next; a model is fitted once for all points of a call."""
        if self.method == "sobol":
            return lambda pending, seed: pending[:0]
        if self.method == "nsga2":
            return lambda pending, seed: children(
                trials, _POPULATION, _CHILDREN, np.random.default_rng(seed)
            )
        return self._modelled(trials)

    def _modelled(self, trials: Trials) -> Candidates:
        import torch

        from mergepipe_pipeline.optimise.acquisition import by_gain, maxima, reranked
        from mergepipe_pipeline.optimise.surrogate import fitted

        torch.manual_seed(self._seed(len(trials)))
        model = fitted(trials, self.length_scales, self.prior)

        def candidates(pending: F64Array, seed: int) -> F64Array:
            torch.manual_seed(seed)
            points, gains, means = maxima(model, trials, pending, seed)
            if self.method == "sync":
                return points[by_gain(gains)]
            return points[reranked(points, gains, means, trials.values, pending)]

        return candidates

    def _seed(self, number: int) -> int:
        """A seed of its own for each point of a search."""
        return int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0])


@contextmanager
def _repeatable() -> Iterator[None]:
    """torch adds up in one order, and its generator is left as it was.

    So does SciPy, whose threads for a hundred numbers wait for each other: a point takes half.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            threadpool_limits(1, "blas"),
        ):
            # Of values that are all equal, or of a fit that stops at its last step.
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def _refuse_without_botorch(method: Method) -> None:
    if find_spec("botorch") is None:
        raise MergePipeError(
            f"The search method {method} needs a package that is not installed",
            found="no module botorch",
            next_step="pip install 'mergepipe-pipeline[search]' (in a clone: '.[search]'), or take "
            "nsga2 or sobol",
        )
