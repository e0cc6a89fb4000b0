"""Which points to try next: AP-BMM (arXiv 2512.09972), a pure function of what is known.

A search that was killed so goes on from its ledger with the same proposals. After a design, each
point is the best one given those that are pending.

Model: one Gaussian process per objective, Matérn 5/2 with a length-scale per dimension, and two
terms that few trials tell enough about: a linear one, and one over the whole cube: over the mean
coordinate, which is what a sweep of one weight for all layers varies, and the distance to the
middle. A model would else try the corners one by one, stitched from pure layers, which it knows
least. The noise is fitted, too. The fit holds length-scales to the proportions that a prior
expects, and all of them to how far points of so many dimensions are apart, within wide margins
(Hvarfner, Hellsten and Nardi, arXiv 2402.02229).

Choice: BoTorch's qLogNEHVI, the expected gain of hypervolume, given what is pending. Its local
maxima are ranked again: a little for filling a gap of the front, a little against lying close to a
pending point. Loading the module loads neither torch nor BoTorch, which is the extra `search`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from mergepipe_pipeline.arrays import F64Array, I64Array
from mergepipe_pipeline.errors import not_installed
from mergepipe_pipeline.search.pareto import REFERENCE, Trials, design, fresh, front, gaps, rounded

if TYPE_CHECKING:
    from botorch.models import SingleTaskGP


#: Length-scales stay within these.
_LIMITS = (0.025, 1000.0)
#: A standard deviation of logarithms of length-scales, and the mode of each for one dimension.
_SPREAD = math.sqrt(3)
_MODE = math.exp(math.sqrt(2) - _SPREAD**2)
#: More steps predict no better, measured on DTLZ2.
_FIT_STEPS = 40
#: Samples of the processes, points compared near the front and anywhere, and those climbed from.
_SAMPLES, _RAW, _STARTS = 64, 128, 4
#: About so many dimensions of a point near the front are moved, by a standard deviation of so much.
_MOVED, _WIDTH = 10, 0.1
#: Steps of a climb, each of this length at most: far from all trials a model knows too little for
#: longer ways, which end in corners of the cube.
_STEPS, _STEP = 12, 0.025
_GAP_WEIGHT, _PENDING_WEIGHT = 0.25, 0.15
#: A gap counts half a standard deviation away from its middle; no gap is narrower.
_NARROWEST = 1e-3
#: From pending points and a seed to candidates, best first.
Candidates = Callable[[F64Array, int], F64Array]


def refuse_without_botorch() -> None:
    """Raise MergePipeError where the package that models trials is not installed."""
    if find_spec("botorch") is None:
        what = "A search needs a package that is not installed"
        raise not_installed(what, "search", "no module botorch")


@dataclass(frozen=True, slots=True)
class Proposer:
    """Says where to evaluate next, in a cube of `dims` dimensions: one point after the other.

    The first `initial` points are those of `begin` [n, dims], then of a design. `length_scales`
    [dims] are what a prior expects of dimensions, relative to each other.
    """

    dims: int
    seed: int
    initial: int
    length_scales: F64Array
    begin: F64Array

    def propose(self, trials: Trials, pending: F64Array, count: int) -> F64Array:
        """Up to `count` points of the grid, [count, dims], neither known nor pending.

        The same arguments and seed give the same points in every process. Fewer where the grid is
        used up.
        """
        taken = pending.reshape(-1, self.dims)
        first = len(trials) + len(taken)
        even = design(self.dims, self.seed, 2 * (first + count) + 64)
        spare = np.concatenate([self.begin, even])
        candidates: Candidates | None = None
        with _repeatable():
            for number in range(first, first + count):
                points = spare
                if number >= self.initial and len(trials) > 1:
                    candidates = candidates or self.candidates(trials)
                    chosen = rounded(candidates(taken, self.seed_of(number)))
                    points = np.concatenate([chosen, spare])
                new = fresh(points, trials.points, taken)[:1]
                if not len(new):
                    break
                taken = np.concatenate([taken, new])
        return taken[len(pending) :]

    def candidates(self, trials: Trials) -> Candidates:
        """Return what to try next by a model, which is fitted once for all points of a call."""
        import torch

        torch.manual_seed(self.seed_of(len(trials)))
        model = fitted(trials, self.length_scales)

        def best(pending: F64Array, seed: int) -> F64Array:
            torch.manual_seed(seed)
            points, gains, means = maxima(model, trials, pending, seed)
            return points[reranked(points, gains, means, trials.values, pending)]

        return best

    def seed_of(self, number: int) -> int:
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


def fitted(trials: Trials, length_scales: F64Array) -> SingleTaskGP:
    """The processes, fitted to two trials or more."""
    import torch
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.transforms import Standardize
    from gpytorch.mlls import ExactMarginalLogLikelihood

    values = torch.from_numpy(trials.values)
    objectives = values.shape[1]
    lengths, dims = torch.tensor(length_scales), len(length_scales)
    kernel = _held(lengths, objectives)
    # Over the mean and the distance, which stand behind the other terms.
    whole = _matern((2 * dims, 2 * dims + 1), objectives, (0.1, 10.0), torch.ones(1))
    model = SingleTaskGP(
        torch.from_numpy(trials.points),
        values,
        covar_module=kernel + _linear(dims, objectives) + whole,
        outcome_transform=Standardize(objectives),
        input_transform=_with_terms(lengths),
    )
    likelihood = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(likelihood, optimizer_kwargs={"options": {"maxiter": _FIT_STEPS}})
    return model


def _held(lengths: Any, objectives: int) -> Any:
    """Matérn 5/2 with length-scales drawn to the proportions of those given."""
    from gpytorch.priors import LogNormalPrior

    # Of equal lengths the square root of their number is left: points are that much further apart.
    relative = lengths * (lengths**-2).sum().sqrt()
    centre = (_MODE * relative).log() + _SPREAD**2
    law = LogNormalPrior(centre, centre.new_full(centre.shape, _SPREAD))
    places = tuple(range(len(lengths)))
    return _matern(places, objectives, _LIMITS, law.mode, lengthscale_prior=law)


def _matern(
    places: tuple[int, ...],
    objectives: int,
    limits: tuple[float, float],
    start: Any,
    **more: Any,
) -> Any:
    """A scaled Matérn 5/2 for each objective over the coordinates at `places`."""
    import torch
    from gpytorch.constraints import Interval
    from gpytorch.kernels import MaternKernel, ScaleKernel

    batch = torch.Size([objectives])
    kernel = MaternKernel(
        nu=2.5,
        ard_num_dims=len(places),
        active_dims=places,
        batch_shape=batch,
        lengthscale_constraint=Interval(*limits, transform=None),
        **more,
    )
    kernel.lengthscale = start.clamp(*limits).expand(*batch, 1, len(places))
    return ScaleKernel(kernel, batch_shape=batch).double()


def _with_terms(lengths: Any) -> Any:
    """Points [d] with what the other terms look at: d coordinates from the middle of the cube,
    their mean, −1 to 1, and the squared distance to the middle, 1 in the corners.

    Dimensions count as their length-scales say.
    """
    from botorch.models.transforms.input import AppendFeatures

    weights = lengths**-2 / (lengths**-2).sum()

    def terms(points: Any) -> Any:
        import torch

        off = (points - 0.5) * weights.sqrt()
        mean = 2 * (off * weights.sqrt()).sum(-1, keepdim=True)
        distance = 4 * (off**2).sum(-1, keepdim=True)
        return torch.cat([off, mean, distance], -1).unsqueeze(-2)

    return AppendFeatures(f=terms, transform_on_train=True)


def _linear(dims: int, objectives: int) -> Any:
    """The linear kernel over the coordinates from the middle."""
    import torch
    from gpytorch.constraints import Interval
    from gpytorch.kernels import LinearKernel

    return LinearKernel(
        active_dims=tuple(range(dims, 2 * dims)),
        batch_shape=torch.Size([objectives]),
        variance_constraint=Interval(1e-6, 1e3, transform=None, initial_value=1.0),
    ).double()


def maxima(
    model: SingleTaskGP, trials: Trials, pending: F64Array, seed: int
) -> tuple[F64Array, F64Array, F64Array]:
    """Local maxima of the gain: points [r, d], gains [r] as logarithms, expected values [r, m]."""
    import torch
    from botorch.acquisition.multi_objective import logei
    from botorch.optim.initializers import initialize_q_batch
    from botorch.sampling import SobolQMCNormalSampler

    points, objectives = torch.from_numpy(trials.points), trials.values.shape[1]
    # Else BoTorch compiles a kernel for half a minute, under a lock that a killed process leaves
    # behind for ever, and gains nothing for two objectives.
    logei._load_attempted = True
    gain = logei.qLogNoisyExpectedHypervolumeImprovement(
        model,
        ref_point=[REFERENCE] * objectives,
        X_baseline=points,
        sampler=SobolQMCNormalSampler(torch.Size([_SAMPLES]), seed=seed),
        prune_baseline=True,
        X_pending=torch.from_numpy(pending) if len(pending) else None,
    )
    starts = torch.from_numpy(_raw(trials, seed)).unsqueeze(1)
    with torch.no_grad():
        optima, _ = initialize_q_batch(starts, gain(starts), _STARTS)
    optima.requires_grad_(True)
    steps = torch.optim.Adam([optima], lr=_STEP, maximize=True)
    for _ in range(_STEPS):
        steps.zero_grad()
        gain(optima).sum().backward()
        steps.step()
        optima.data.clamp_(0.0, 1.0)
    with torch.no_grad():
        gains, optima = gain(optima), optima.detach().squeeze(-2)
        means = model.posterior(optima).mean
    return optima.numpy(), gains.numpy(), means.numpy()


def _raw(trials: Trials, seed: int) -> F64Array:
    """Where the climbs may start: near points of the front, and anywhere."""
    random = np.random.default_rng(seed)
    dims = trials.points.shape[1]
    best = trials.points[front(trials.values)]
    close = best[random.integers(len(best), size=_RAW)]
    moved = random.random(close.shape) < _MOVED / dims
    moved[np.arange(_RAW), random.integers(dims, size=_RAW)] = True
    close += moved * random.normal(0.0, _WIDTH, close.shape)
    return np.concatenate([np.clip(close, 0.0, 1.0), random.random((_RAW, dims))])


def reranked(
    points: F64Array, gains: F64Array, means: F64Array, values: F64Array, pending: F64Array
) -> I64Array:
    """The order by gain, gaps that expected values fill, and distance to pending points.

    A gain counts as a share of the largest one. The paper takes it between the extremes, where a
    logarithm lets a candidate of a third of the gain look like the best one.
    """
    score = np.exp(gains - gains.max())
    score += _GAP_WEIGHT * _gap_filling(means, values)
    if len(pending):
        distance = np.linalg.norm(points[:, None] - pending[None], axis=2).min(axis=1)
        score -= _PENDING_WEIGHT * np.exp(-4 * distance)
    return np.argsort(-score, kind="stable")


def _gap_filling(means: F64Array, values: F64Array) -> F64Array:
    """0 to 1: how near values would be to the middle of a gap of the front, by the gap's size."""
    middles, sizes = gaps(values)
    if not len(sizes):
        return np.zeros(len(means))
    ends = values[front(values)]
    width = max(float(np.linalg.norm(np.ptp(ends, axis=0))) / len(sizes), _NARROWEST)
    distance = np.linalg.norm(means[:, None] - middles[None], axis=2)
    filling: F64Array = (np.exp(-0.5 * (distance / width) ** 2) * sizes / sizes.max()).max(axis=1)
    return filling
