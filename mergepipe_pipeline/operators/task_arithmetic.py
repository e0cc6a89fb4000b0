"""Task arithmetic and its sparse, voting relatives: B + λ · mix of weighted deltas.

One order for all: sparsify, rescale, weight, vote, mix, normalise, λ, base; as in mergekit, and all
float32. Here the weights enter the sign vote, unlike in the TIES paper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from mergepipe_pipeline.operators.registry import (
    ONE_EACH,
    Density,
    Int8Mask,
    Lambda,
    PerModel,
    Weight,
    Window,
    operator,
)
from mergepipe_pipeline.operators.sparsify import check_drop, check_trim, drop, trim

if TYPE_CHECKING:
    from torch import Tensor

SUM_EPSILON = 1e-8

Normalize = Annotated[bool, "divide the mix by the sum of the weights that take part"]
Rescale = Annotated[bool, "scale a sparsified delta back to the L1 norm it had before"]
Sparsifier = Callable[[Window, int, float], None]


def _coefficients(
    weight: PerModel, normalize: bool, lambda_: float, **_: object
) -> tuple[float, ...]:
    total = _divisor(weight) if normalize else 1.0
    return tuple(lambda_ * w / total for w in weight)


def _divisor(weight: PerModel) -> float:
    total = sum(weight)
    return 1.0 if abs(total) < SUM_EPSILON else total


def _check_trim(tensor: str, numel: int, density: PerModel, **_: object) -> None:
    check_trim(tensor, numel, density)


def _check_drop(tensor: str, numel: int, density: PerModel, **_: object) -> None:
    check_drop(tensor, numel, density)


def _sparsify(window: Window, density: PerModel, sparsifier: Sparsifier, rescale: bool) -> None:
    for k, share in enumerate(density):
        sparsifier(window, k, share)
        if rescale and share < 1:
            window.experts[k].mul_(window.task.experts[k].scale)


def _weigh(window: Window, weight: PerModel) -> None:
    for k, factor in enumerate(weight):
        window.experts[k].mul_(factor)


def _sum(window: Window, weight: PerModel, normalize: bool) -> Tensor:
    """Σ d̃ᵢ (over Σ wᵢ), in the first row's memory."""
    mix = window.experts[0]
    for k in range(1, len(weight)):
        mix.add_(window.experts[k])
    if normalize:
        mix.div_(_summed(weight, mix))
    return mix


def _summed(weight: PerModel, like: Tensor) -> Tensor:
    """Σ wᵢ as a float32 scalar on the device of `like`, 1 where it vanishes.

    Added up in float32 as mergekit does. A tensor, since some devices divide by a Python number
    through its rounded reciprocal.
    """
    total = like.new_full((), weight[0])
    for factor in weight[1:]:
        total.add_(factor)
    return total if abs(total.item()) >= SUM_EPSILON else total.fill_(1.0)


def _elected_sum(window: Window, weight: PerModel, normalize: bool) -> Tensor:
    """Σ of the d̃ᵢ that have the sign of Σ d̃ᵢ (over the Σ of their wᵢ), in the first row's memory.

    Works on d̃ᵢ · sign: agreeing elements are the positive ones, zeros never agree.
    """
    experts = window.experts
    sign = experts[0].clone()
    for k in range(1, len(weight)):
        sign.add_(experts[k])
    sign.ge_(0).mul_(2).sub_(1)

    mix = experts[0].mul_(sign).clamp_(min=0)
    divisor = mix.sign().mul_(weight[0]) if normalize else None
    for k in range(1, len(weight)):
        agreeing = experts[k].mul_(sign).clamp_(min=0)
        mix.add_(agreeing)
        if divisor is not None:
            divisor.add_(agreeing.sign_().mul_(weight[k]))
    if divisor is not None:
        mix.div_(divisor.add_(divisor.clone().eq_(0)))  # a divisor of zero becomes one
    return mix.mul_(sign)


def _add_base(window: Window, mix: Tensor, lambda_: float) -> Tensor:
    """B + λ·mix; where the mix is zero of either sign, exactly the base's bits, −0 included.

    −0 + 0 is +0, but −0 − 0 is −0: hence the update is negated, its zeros made +0, and subtracted.
    """
    assert window.base is not None
    return window.base.sub(mix.mul_(-lambda_).add_(0.0))


@operator(
    "task_arithmetic",
    formula="B + λ Σ wᵢδᵢ, the sum divided by Σ wᵢ if normalize",
    reference="https://arxiv.org/abs/2212.04089",
    coefficients=_coefficients,
)
def task_arithmetic(
    window: Window,
    *,
    weight: Weight,
    normalize: Normalize = False,
    lambda_: Lambda = 1.0,
    int8_mask: Int8Mask = False,
) -> Tensor:
    """Weighted sum of deltas on top of the base. Source: https://arxiv.org/abs/2212.04089."""
    _weigh(window, weight)
    return _add_base(window, _sum(window, weight, normalize), lambda_)


@operator(
    "ties",
    fact="trim",
    response="vote",
    formula="d̃ᵢ = wᵢ·trim(δᵢ); s = sign Σ d̃ᵢ (0 is +); B + λ Σ d̃ᵢ[sign d̃ᵢ = s], "
    "the sum divided by Σ wᵢ[sign d̃ᵢ = s] if normalize",
    reference="https://arxiv.org/abs/2306.01708",
    coefficients=_coefficients,
    check=_check_trim,
)
def ties(
    window: Window,
    *,
    weight: Weight,
    density: Density = ONE_EACH,
    normalize: Normalize = True,
    rescale: Rescale = False,
    lambda_: Lambda = 1.0,
    int8_mask: Int8Mask = False,
) -> Tensor:
    """Trim small magnitudes, elect a sign per element, mix what agrees.

    Source: https://arxiv.org/abs/2306.01708, with mergekit's trim per tensor and weighted vote.
    """
    _sparsify(window, density, trim, rescale)
    _weigh(window, weight)
    return _add_base(window, _elected_sum(window, weight, normalize), lambda_)


@operator(
    "dare_linear",
    fact="drop",
    formula="B + λ Σ wᵢ·cᵢ·drop(δᵢ), cᵢ = ‖δᵢ‖₁/‖drop(δᵢ)‖₁ if rescale, else 1; "
    "the sum divided by Σ wᵢ if normalize",
    reference="https://arxiv.org/abs/2311.03099",
    coefficients=_coefficients,
    check=_check_drop,
)
def dare_linear(
    window: Window,
    *,
    weight: Weight,
    density: Density = ONE_EACH,
    normalize: Normalize = False,
    rescale: Rescale = True,
    lambda_: Lambda = 1.0,
    int8_mask: Int8Mask = False,
) -> Tensor:
    """Drop elements at random, then task arithmetic.

    Source: https://arxiv.org/abs/2311.03099, with mergekit's L1 rescale in place of 1/density.
    """
    _sparsify(window, density, drop, rescale)
    _weigh(window, weight)
    return _add_base(window, _sum(window, weight, normalize), lambda_)


@operator(
    "dare_ties",
    fact="drop",
    response="vote",
    formula="d̃ᵢ = wᵢ·cᵢ·drop(δᵢ), cᵢ = ‖δᵢ‖₁/‖drop(δᵢ)‖₁ if rescale, else 1; then as ties",
    reference="https://arxiv.org/abs/2311.03099",
    coefficients=_coefficients,
    check=_check_drop,
)
def dare_ties(
    window: Window,
    *,
    weight: Weight,
    density: Density = ONE_EACH,
    normalize: Normalize = False,
    rescale: Rescale = True,
    lambda_: Lambda = 1.0,
    int8_mask: Int8Mask = False,
) -> Tensor:
    """Drop elements at random, then the sign vote of ties.

    Source: https://arxiv.org/abs/2311.03099, with mergekit's L1 rescale in place of 1/density.
    """
    _sparsify(window, density, drop, rescale)
    _weigh(window, weight)
    return _add_base(window, _elected_sum(window, weight, normalize), lambda_)
