"""Steps that the methods on task vectors share: weigh, vote, sum, normalise, add the base.

Not methods: the modules of the methods put these together. All are elementwise and in float32, and
take experts in recipe order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np

from mergepipe_pipeline.operators.steps.registry import PerModel, Window

if TYPE_CHECKING:
    from torch import Tensor

SUM_EPSILON = 1e-8

Normalize = Annotated[bool, "divide the mix by the sum of the weights that take part"]
Rescale = Annotated[bool, "scale a sparsified delta back to the L1 norm it had before"]


def coefficients(
    weight: PerModel, normalize: bool, lambda_: float, **_: object
) -> tuple[float, ...]:
    """The cᵢ of a weighted sum of deltas: λwᵢ, over Σ wᵢ if normalised."""
    total = sum(weight) if normalize else 1.0
    total = 1.0 if abs(total) < SUM_EPSILON else total
    return tuple(lambda_ * w / total for w in weight)


def rescale_to_norm(window: Window, density: PerModel) -> None:
    """Scale each sparsified delta by the factor of its L1 norm that the plan brings."""
    for k, share in enumerate(density):
        if share < 1:
            window.experts[k].mul_(window.task.experts[k].scale)


def weigh(window: Window, weight: PerModel) -> None:
    """d̃ᵢ = wᵢ·δᵢ, in place."""
    for k, factor in enumerate(weight):
        window.experts[k].mul_(factor)


def linear_sum(window: Window, weight: PerModel, normalize: bool) -> Tensor:
    """Σ d̃ᵢ (over Σ wᵢ), in the first row's memory."""
    mix = window.experts[0]
    for k in range(1, len(weight)):
        mix.add_(window.experts[k])
    if normalize:
        mix.div_(mix.new_full((), summed(weight, at_least=SUM_EPSILON)))
    return mix


def elected_sum(window: Window, weight: PerModel, normalize: bool) -> Tensor:
    """Σ of the d̃ᵢ with the sign of Σ d̃ᵢ (over the Σ of their wᵢ), in the first row's memory."""
    sign = elect_(window.experts)  # [n]; the experts [K, n] become |d̃ᵢ| where they agree, or 0
    mix = window.experts[0]  # [n]
    divisor = mix.sign().mul_(weight[0]) if normalize else None  # [n]: Σ of agreeing weights
    for k in range(1, len(weight)):
        agreeing = window.experts[k]
        mix.add_(agreeing)
        if divisor is not None:
            divisor.add_(agreeing.sign_().mul_(weight[k]))
    if divisor is not None:
        mix.div_(divisor.add_(divisor.clone().eq_(0)))  # a divisor of zero becomes one
    return mix.mul_(sign)


def elect_(experts: Tensor) -> Tensor:
    """The sign of Σ dᵢ per element, as ±1 with + for zero; `experts` [K, n] become their agreement.

    That is |dᵢ| where dᵢ has the elected sign and 0 elsewhere: a zero never agrees.
    """
    sign = experts[0].clone()  # [n]: the sum, then its sign
    for k in range(1, experts.shape[0]):
        sign.add_(experts[k])
    sign.ge_(0).mul_(2).sub_(1)
    experts.mul_(sign).clamp_(min=0)
    return sign


def add_base(window: Window, mix: Tensor, lambda_: float = 1.0) -> Tensor:
    """B + λ·mix; where the mix is zero of either sign, exactly the base's bits, −0 included.

    −0 + 0 is +0, but −0 − 0 is −0: hence the update is negated, its zeros made +0, and subtracted.
    """
    assert window.base is not None
    return window.base.sub(mix.mul_(-lambda_).add_(0.0))


def summed(weight: Sequence[float], *, at_least: float) -> float:
    """Σ wᵢ added up in float32 as mergekit does, 1 where it is smaller than `at_least`.

    To divide by it, make a tensor of it: some devices divide by a Python number through its
    rounded reciprocal.
    """
    total = np.float32(weight[0])
    for factor in weight[1:]:
        total += np.float32(factor)
    return float(total) if abs(total) >= at_least else 1.0
