"""Task arithmetic and its relatives that sparsify by magnitude: B + λ · mix of weighted deltas.

One order for all: sparsify, rescale, weight, vote, mix, normalise, λ, base; as in mergekit, and all
float32. The weights enter the sign vote, which in the TIES paper has none. `dare` and `della` hold
the relatives that sparsify at random.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators.steps import describe, mix
from mergepipe_pipeline.operators.steps.fused import Fused, FusedRow
from mergepipe_pipeline.operators.steps.mix import Normalize, Rescale
from mergepipe_pipeline.operators.steps.registry import Hooks, operator
from mergepipe_pipeline.operators.steps.signature import (
    ONE_EACH,
    AtLeast,
    Density,
    Int8Mask,
    Lambda,
    PerModel,
    Variant,
    Weight,
)
from mergepipe_pipeline.operators.steps.sparsify import band, trim
from mergepipe_pipeline.operators.steps.tensor_window import Window
from mergepipe_pipeline.spec.plan import TensorTask

if TYPE_CHECKING:
    from torch import Tensor

Gamma = Annotated[PerModel, "share of the delta's largest elements to drop as outliers", AtLeast(0)]
GAMMA = PerModel((0.01,))


def _without_weights(weight: PerModel, variant: str) -> PerModel:
    return PerModel([1.0] * len(weight)) if variant == "paper" else weight


def _ties_coefficients(
    weight: PerModel, normalize: bool, lambda_: float, variant: str, **_: object
) -> tuple[float, ...]:
    return mix.coefficients(_without_weights(weight, variant), normalize, lambda_)


def _check_ties(
    tensor: str, shape: tuple[int, ...], weight: PerModel, variant: str, **_: object
) -> None:
    if variant == "paper" and len(set(weight)) > 1:
        raise OperatorError(
            "TIES of the paper has no weights",
            where=f"tensor {tensor}",
            expected="the same weight for every model",
            found=f"weights {list(weight)}",
            next_step="give equal weights, or set variant: mergekit",
        )


def _band_all(window: Window, density: PerModel, rescale: bool) -> None:
    for k, share in enumerate(density):
        band(window, k, share)
    if rescale:
        mix.rescale_to_norm(window, density)


def _fused_sum(
    task: TensorTask, weight: PerModel, normalize: bool, lambda_: float, **_: object
) -> Fused:
    return describe.update([FusedRow(w) for w in weight], weight, normalize, lambda_)


def _fused_ties(
    task: TensorTask,
    weight: PerModel,
    density: PerModel,
    normalize: bool,
    rescale: bool,
    lambda_: float,
    variant: str,
    **_: object,
) -> Fused:
    weight = _without_weights(weight, variant)
    rows = describe.sparsified(task, weight, density, "trim", rescale=rescale)
    return describe.vote(rows, normalize, lambda_)


def _banded(
    task: TensorTask, weight: PerModel, density: PerModel, rescale: bool, **_: object
) -> list[FusedRow | None]:
    return describe.sparsified(task, weight, density, "band", rescale=rescale)


def _fused_band(
    task: TensorTask, weight: PerModel, normalize: bool, lambda_: float, **sparsing: Any
) -> Fused:
    return describe.update(_banded(task, weight, **sparsing), weight, normalize, lambda_)


def _fused_band_vote(
    task: TensorTask, weight: PerModel, normalize: bool, lambda_: float, **sparsing: Any
) -> Fused:
    return describe.vote(_banded(task, weight, **sparsing), normalize, lambda_)


@operator(
    "task_arithmetic",
    formula="B + λ Σ wᵢδᵢ, the sum divided by Σ wᵢ if normalize",
    reference="https://arxiv.org/abs/2212.04089",
    hooks=Hooks(coefficients=mix.coefficients, fused=_fused_sum),
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
    mix.weigh(window, weight)
    return mix.add_base(window, mix.linear_sum(window, weight, normalize), lambda_)


@operator(
    "ties",
    fact="trim",
    response="vote",
    formula="d̃ᵢ = wᵢ·trim(δᵢ), without the wᵢ if variant is paper; s = sign Σ d̃ᵢ (0 is +); "
    "B + λ Σ d̃ᵢ[sign d̃ᵢ = s], the sum divided by Σ wᵢ[sign d̃ᵢ = s] if normalize",
    reference="https://arxiv.org/abs/2306.01708",
    hooks=Hooks(coefficients=_ties_coefficients, check=_check_ties, fused=_fused_ties),
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
    variant: Variant = "mergekit",
) -> Tensor:
    """Trim small magnitudes, elect a sign per element, mix what agrees.

    Source: https://arxiv.org/abs/2306.01708, with mergekit's trim per tensor and, unless `variant`
    is "paper", its weighted vote; the paper's mean of what agrees counts every model once.
    """
    for k, share in enumerate(density):
        trim(window, k, share)
    if rescale:
        mix.rescale_to_norm(window, density)
    weight = _without_weights(weight, variant)
    mix.weigh(window, weight)
    return mix.add_base(window, mix.elected_sum(window, weight, normalize), lambda_)


@operator(
    "breadcrumbs",
    fact="band",
    formula="B + λ Σ wᵢ·band(δᵢ), the sum divided by Σ wᵢ if normalize; band drops the share γ of "
    "the largest magnitudes, then the smallest down to the density",
    reference="https://arxiv.org/abs/2312.06795",
    hooks=Hooks(coefficients=mix.coefficients, fused=_fused_band),
)
def breadcrumbs(
    window: Window,
    *,
    weight: Weight,
    density: Density = ONE_EACH,
    gamma: Gamma = GAMMA,
    normalize: Normalize = False,
    rescale: Rescale = False,
    lambda_: Lambda = 1.0,
    int8_mask: Int8Mask = False,
) -> Tensor:
    """Drop outliers and small magnitudes, then task arithmetic.

    Source: https://arxiv.org/abs/2312.06795, per tensor as in mergekit.
    """
    _band_all(window, density, rescale)
    mix.weigh(window, weight)
    return mix.add_base(window, mix.linear_sum(window, weight, normalize), lambda_)


@operator(
    "breadcrumbs_ties",
    fact="band",
    response="vote",
    formula="d̃ᵢ = wᵢ·band(δᵢ) as in breadcrumbs; then as ties",
    reference="https://arxiv.org/abs/2312.06795",
    hooks=Hooks(coefficients=mix.coefficients, fused=_fused_band_vote),
)
def breadcrumbs_ties(
    window: Window,
    *,
    weight: Weight,
    density: Density = ONE_EACH,
    gamma: Gamma = GAMMA,
    normalize: Normalize = False,
    rescale: Rescale = False,
    lambda_: Lambda = 1.0,
    int8_mask: Int8Mask = False,
) -> Tensor:
    """Drop outliers and small magnitudes, then the sign vote of ties.

    Source: https://arxiv.org/abs/2312.06795, per tensor and with a weighted vote as in mergekit.
    """
    _band_all(window, density, rescale)
    mix.weigh(window, weight)
    return mix.add_base(window, mix.elected_sum(window, weight, normalize), lambda_)
