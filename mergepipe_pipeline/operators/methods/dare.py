"""DARE and DELLA: deltas sparsified at random, then task arithmetic or the sign vote of ties.

The order of steps is that of `task_arithmetic`. mergekit scales what is left back to the delta's L1
norm, a fact of the plan; the papers divide each kept element by its probability, known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from mergepipe_pipeline.operators.steps import describe, mix
from mergepipe_pipeline.operators.steps.fused import Fused, FusedRow
from mergepipe_pipeline.operators.steps.mix import Normalize, Rescale
from mergepipe_pipeline.operators.steps.registry import Hooks, operator
from mergepipe_pipeline.operators.steps.signature import (
    ONE_EACH,
    Density,
    Int8Mask,
    Lambda,
    PerModel,
    Variant,
    Weight,
)
from mergepipe_pipeline.operators.steps.sparsify import check_drop, check_ranked, drop, drop_by_rank
from mergepipe_pipeline.operators.steps.tensor_window import Window
from mergepipe_pipeline.spec.plan import TensorTask

if TYPE_CHECKING:
    from torch import Tensor

Epsilon = Annotated[PerModel, "how far below and above the density the probabilities reach"]
EPSILON = PerModel((0.15,))


def _check_drop(tensor: str, shape: tuple[int, ...], density: PerModel, **_: object) -> None:
    check_drop(tensor, density)


def _check_ranked(
    tensor: str, shape: tuple[int, ...], density: PerModel, epsilon: PerModel, **_: object
) -> None:
    check_ranked(tensor, density, epsilon)


def _dare_coefficients(
    weight: PerModel,
    density: PerModel,
    normalize: bool,
    rescale: bool,
    lambda_: float,
    variant: str,
    **_: object,
) -> tuple[float, ...]:
    plain = mix.coefficients(weight, normalize, lambda_)
    if not rescale or variant != "paper":
        return plain
    return tuple(c / d if 0 < d < 1 else c for c, d in zip(plain, density, strict=True))


def _fused_rows(
    task: TensorTask,
    weight: PerModel,
    density: PerModel,
    rescale: bool,
    variant: str,
    **_: object,
) -> list[FusedRow | None]:
    inverse = variant == "paper"
    return describe.sparsified(task, weight, density, "drop", rescale=rescale, inverse=inverse)


def _fused_sum(
    task: TensorTask, weight: PerModel, normalize: bool, lambda_: float, **sparsing: Any
) -> Fused:
    rows = _fused_rows(task, weight, **sparsing)
    return describe.update(rows, weight, normalize, lambda_)


def _fused_vote(
    task: TensorTask, weight: PerModel, normalize: bool, lambda_: float, **sparsing: Any
) -> Fused:
    return describe.vote(_fused_rows(task, weight, **sparsing), normalize, lambda_)


def _drop_all(window: Window, density: PerModel, rescale: bool, variant: str) -> None:
    for k, share in enumerate(density):
        drop(window, k, share)
        if rescale and variant == "paper" and 0 < share < 1:
            window.experts[k].div_(window.experts.new_full((), share))
    if rescale and variant == "mergekit":
        mix.rescale_to_norm(window, density)


def _drop_all_by_rank(
    window: Window, density: PerModel, epsilon: PerModel, rescale: bool, variant: str
) -> None:
    inverse = rescale and variant == "paper"
    for k, share in enumerate(density):
        drop_by_rank(window, k, share, epsilon[k], inverse=inverse)
    if rescale and not inverse:
        mix.rescale_to_norm(window, density)


@operator(
    "dare_linear",
    fact="drop",
    formula="B + λ Σ wᵢ·cᵢ·drop(δᵢ), the sum divided by Σ wᵢ if normalize; cᵢ = 1 unless rescale, "
    "else ‖δᵢ‖₁/‖drop(δᵢ)‖₁, or 1/density if variant is paper",
    reference="https://arxiv.org/abs/2311.03099",
    hooks=Hooks(coefficients=_dare_coefficients, check=_check_drop, fused=_fused_sum),
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
    variant: Variant = "mergekit",
) -> Tensor:
    """Drop elements at random, then task arithmetic. Source: https://arxiv.org/abs/2311.03099."""
    _drop_all(window, density, rescale, variant)
    mix.weigh(window, weight)
    return mix.add_base(window, mix.linear_sum(window, weight, normalize), lambda_)


@operator(
    "dare_ties",
    fact="drop",
    response="vote",
    formula="d̃ᵢ = wᵢ·cᵢ·drop(δᵢ) as in dare_linear; then as ties",
    reference="https://arxiv.org/abs/2311.03099",
    hooks=Hooks(coefficients=_dare_coefficients, check=_check_drop, fused=_fused_vote),
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
    variant: Variant = "mergekit",
) -> Tensor:
    """Drop elements at random, then a weighted sign vote. Source: https://arxiv.org/abs/2311.03099."""
    _drop_all(window, density, rescale, variant)
    mix.weigh(window, weight)
    return mix.add_base(window, mix.elected_sum(window, weight, normalize), lambda_)


@operator(
    "della",
    fact="ranked",
    scope="row",
    response="unbounded",
    formula="d̃ᵢ = wᵢ·cᵢ·drop(δᵢ) as in della_linear; then as ties",
    reference="https://arxiv.org/abs/2406.11617",
    hooks=Hooks(coefficients=mix.coefficients, check=_check_ranked),
)
def della(
    window: Window,
    *,
    weight: Weight,
    density: Density = ONE_EACH,
    epsilon: Epsilon = EPSILON,
    normalize: Normalize = True,
    rescale: Rescale = True,
    lambda_: Lambda = 1.0,
    int8_mask: Int8Mask = False,
    variant: Variant = "mergekit",
) -> Tensor:
    """Drop elements at random by rank in their row, then a weighted sign vote.

    Source: https://arxiv.org/abs/2406.11617.
    """
    _drop_all_by_rank(window, density, epsilon, rescale, variant)
    mix.weigh(window, weight)
    return mix.add_base(window, mix.elected_sum(window, weight, normalize), lambda_)


@operator(
    "della_linear",
    fact="ranked",
    scope="row",
    response="unbounded",
    formula="B + λ Σ wᵢ·cᵢ·drop(δᵢ), the sum divided by Σ wᵢ if normalize; drop keeps with "
    "p = density − ε + 2ε·rank(|δ|)/(n − 1) in rows of n; cᵢ = 1 unless rescale, else "
    "‖δᵢ‖₁/‖drop(δᵢ)‖₁, or each element's 1/p if variant is paper",
    reference="https://arxiv.org/abs/2406.11617",
    hooks=Hooks(coefficients=mix.coefficients, check=_check_ranked),
)
def della_linear(
    window: Window,
    *,
    weight: Weight,
    density: Density = ONE_EACH,
    epsilon: Epsilon = EPSILON,
    normalize: Normalize = False,
    rescale: Rescale = True,
    lambda_: Lambda = 1.0,
    int8_mask: Int8Mask = False,
    variant: Variant = "mergekit",
) -> Tensor:
    """Drop elements at random by rank in their row, then task arithmetic.

    Source: https://arxiv.org/abs/2406.11617.
    """
    _drop_all_by_rank(window, density, epsilon, rescale, variant)
    mix.weigh(window, weight)
    return mix.add_base(window, mix.linear_sum(window, weight, normalize), lambda_)
