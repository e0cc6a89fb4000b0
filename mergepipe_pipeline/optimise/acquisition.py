"""Where to look next: expected gain of hypervolume, then gaps of the front and distance to pending.

The gain is BoTorch's qLogNEHVI over the processes of `surrogate`, given what is pending. Its local
maxima are ranked again as in AP-BMM (arXiv 2512.09972): a little for filling a gap of the front, a
little against lying close to a pending point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mergepipe_pipeline.arrays import F64Array, I64Array
from mergepipe_pipeline.optimise.pareto import front, gaps
from mergepipe_pipeline.optimise.trials import REFERENCE, Trials

if TYPE_CHECKING:
    from botorch.models import SingleTaskGP

#: Samples of the processes, points compared near the front and anywhere, and those climbed from.
_SAMPLES, _RAW, _STARTS = 64, 128, 4
#: About so many dimensions of a point near the front are moved, by a standard deviation of so much.
_MOVED, _WIDTH = 10, 0.1
#: Steps of a climb, each of this length at most: far from all trials a model knows too little for
#: longer ways, which end in corners of the cube.
_STEPS, _STEP = 12, 0.025
_GAP_WEIGHT, _NEARNESS_WEIGHT = 0.25, 0.15
#: A gap counts half a standard deviation away from its middle; no gap is narrower.
_NARROWEST = 1e-3


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
    near = best[random.integers(len(best), size=_RAW)]
    moved = random.random(near.shape) < _MOVED / dims
    moved[np.arange(_RAW), random.integers(dims, size=_RAW)] = True
    near += moved * random.normal(0.0, _WIDTH, near.shape)
    return np.concatenate([np.clip(near, 0.0, 1.0), random.random((_RAW, dims))])


def by_gain(gains: F64Array) -> I64Array:
    """The order by gain alone, best first."""
    return np.argsort(-gains, kind="stable")


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
        score -= _NEARNESS_WEIGHT * np.exp(-4 * distance)
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
