"""Methods on the values of models, not on deltas: their weighted sum, or one as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mergepipe_pipeline.domain.plan import TensorTask
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators.steps import fused
from mergepipe_pipeline.operators.steps.fused import FusedMerge
from mergepipe_pipeline.operators.steps.mix import summed
from mergepipe_pipeline.operators.steps.registry import (
    ONE_EACH,
    Hooks,
    PerModel,
    Weight,
    Window,
    operator,
)

if TYPE_CHECKING:
    from torch import Tensor


def _check(tensor: str, shape: tuple[int, ...], weight: PerModel, normalize: bool) -> None:
    if normalize and sum(weight) == 0:
        raise OperatorError(
            "The weights of a linear merge sum to zero",
            where=f"tensor {tensor}",
            expected="a sum to divide by",
            found=f"weights {list(weight)}",
            next_step="change a weight, or set normalize: false",
        )


def _coefficients(weight: PerModel, normalize: bool) -> tuple[float, ...]:
    _check("any", (), weight, normalize)
    total = sum(weight) if normalize else 1.0
    return tuple(w / total for w in weight)


def _fused(task: TensorTask, weight: PerModel, normalize: bool) -> FusedMerge:
    _check(task.name, task.shape, weight, normalize)
    return fused.values(weight, normalize)


@operator(
    "linear",
    space="value",
    base="none",
    formula="Σ wᵢTᵢ, divided by Σ wᵢ if normalize",
    reference="https://arxiv.org/abs/2203.05482",
    hooks=Hooks(coefficients=_coefficients, check=_check, fused=_fused),
)
def linear(
    window: Window,
    *,
    weight: Weight,
    normalize: Annotated[bool, "divide by the sum of the weights"] = True,
) -> Tensor:
    """Weighted mean (or sum) of the experts' values.

    Raises OperatorError if normalize is set and the weights sum to zero.
    Source: Model soups (https://arxiv.org/abs/2203.05482).
    """
    _check(window.task.name, window.task.shape, weight, normalize)
    total = window.experts[0].mul_(weight[0])
    for k in range(1, len(weight)):
        # Fused multiply-add, one rounding per expert, as mergekit rounds: terms that cancel would
        # differ by more than their last bit otherwise. Every CPU with FMA gives the same bits.
        total.add_(window.experts[k], alpha=weight[k])
    if normalize:
        total.div_(total.new_full((), summed(weight, at_least=0)))
    return total


def _scales(scale: PerModel) -> tuple[float, ...]:
    return tuple(scale)


@operator(
    "passthrough",
    space="value",
    base="none",
    experts=(1, 1),
    formula="s·T",
    reference="https://github.com/arcee-ai/mergekit/blob/main/docs/merge_methods.md",
    hooks=Hooks(coefficients=_scales),
)
def passthrough(
    window: Window,
    *,
    scale: Annotated[PerModel, "factor of the tensor"] = ONE_EACH,
) -> Tensor:
    """The only expert's values times its scale; with a scale of one, its bits."""
    value = window.experts[0]
    return value if scale[0] == 1 else value.mul_(scale[0])


def is_unscaled(task: TensorTask) -> bool:
    """Whether a task's result is its one expert as it is."""
    scales = [dict(e.params).get("scale", 1) for e in task.experts]
    return task.operator == "passthrough" and scales == [1]
