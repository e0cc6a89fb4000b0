"""What trials say about points not tried: one Gaussian process per objective.

Matérn 5/2 with a length-scale per dimension, and two terms that few trials tell enough about: a
linear one, and one over the whole cube: over the mean coordinate, which is what a sweep of one
weight for all layers varies, and the distance to the middle. A model would else try the corners one
by one, stitched from pure layers, which it knows least. The noise is fitted, too.
Points lie in the unit cube already; values are standardised. What is expected of dimensions enters
through length-scales:

- `none`: nothing is. Each is expected to be as long as points of so many dimensions are far apart,
  within wide margins (Hvarfner, Hellsten and Nardi, arXiv 2402.02229).
- `start`: the fit starts from those given, and then the likelihood alone counts, as in AP-BMM.
- `map`: the fit holds to those given as it does with `none`, dimensions relative to each other.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.optimise.trials import Trials

if TYPE_CHECKING:
    from botorch.models import SingleTaskGP

Prior = Literal["none", "start", "map"]

#: Length-scales stay within these: the paper's, and wider ones where a prior holds them.
_LIMITS, _WIDE_LIMITS = (0.005, 10.0), (0.025, 1000.0)
#: A standard deviation of logarithms of length-scales, and the mode of each for one dimension.
_SPREAD = math.sqrt(3)
_MODE = math.exp(math.sqrt(2) - _SPREAD**2)
#: More steps predict no better, measured on DTLZ2.
_FIT_STEPS = 40


def fitted(trials: Trials, length_scales: F64Array | None, prior: Prior) -> SingleTaskGP:
    """The processes, fitted to two trials or more. Without length-scales the prior is `none`."""
    import torch
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.transforms import Standardize
    from gpytorch.mlls import ExactMarginalLogLikelihood

    values = torch.from_numpy(trials.values)
    objectives = values.shape[1]
    if length_scales is None or prior == "none":
        prior, length_scales = "none", np.ones(trials.points.shape[1])
    lengths, dims = torch.tensor(length_scales), len(length_scales)
    kernel = (_free if prior == "start" else _held)(lengths, objectives)
    model = SingleTaskGP(
        torch.from_numpy(trials.points),
        values,
        covar_module=kernel + _linear(dims, objectives) + _of_whole(2 * dims, objectives),
        outcome_transform=Standardize(objectives),
        input_transform=_with_terms(lengths),
    )
    likelihood = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(likelihood, optimizer_kwargs={"options": {"maxiter": _FIT_STEPS}})
    return model


def _free(lengths: Any, objectives: int) -> Any:
    """Length-scales that start from those given."""
    return _kernel(lengths, objectives, _LIMITS, None)


def _held(lengths: Any, objectives: int) -> Any:
    """Length-scales drawn to the proportions of those given."""
    from gpytorch.priors import LogNormalPrior

    # Of equal lengths the square root of their number is left: points are that much further apart.
    relative = lengths * (lengths**-2).sum().sqrt()
    centre = (_MODE * relative).log() + _SPREAD**2
    law = LogNormalPrior(centre, centre.new_full(centre.shape, _SPREAD))
    return _kernel(law.mode, objectives, _WIDE_LIMITS, law)


def _kernel(start: Any, objectives: int, limits: tuple[float, float], law: Any) -> Any:
    import torch
    from gpytorch.constraints import Interval
    from gpytorch.kernels import MaternKernel, ScaleKernel

    batch = torch.Size([objectives])
    kernel = MaternKernel(
        nu=2.5,
        ard_num_dims=len(start),
        active_dims=tuple(range(len(start))),
        batch_shape=batch,
        lengthscale_prior=law,
        lengthscale_constraint=Interval(*limits, transform=None),
    )
    kernel.lengthscale = start.clamp(*limits).expand(*batch, 1, len(start))
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

        away = (points - 0.5) * weights.sqrt()
        mean = 2 * (away * weights.sqrt()).sum(-1, keepdim=True)
        distance = 4 * (away**2).sum(-1, keepdim=True)
        return torch.cat([away, mean, distance], -1).unsqueeze(-2)

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


def _of_whole(place: int, objectives: int) -> Any:
    """The kernel over that mean and that distance, at `place` and after it."""
    import torch
    from gpytorch.constraints import Interval
    from gpytorch.kernels import MaternKernel, ScaleKernel

    batch = torch.Size([objectives])
    kernel = MaternKernel(
        nu=2.5,
        ard_num_dims=2,
        active_dims=(place, place + 1),
        batch_shape=batch,
        lengthscale_constraint=Interval(0.1, 10.0, transform=None, initial_value=1.0),
    )
    return ScaleKernel(kernel, batch_shape=batch).double()
