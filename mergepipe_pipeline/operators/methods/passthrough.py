"""One model's tensor as it is, or scaled. Works on values, and needs no base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mergepipe_pipeline.operators.steps.registry import Hooks, operator
from mergepipe_pipeline.operators.steps.signature import ONE_EACH, PerModel
from mergepipe_pipeline.operators.steps.tensor_window import Window

if TYPE_CHECKING:
    from torch import Tensor

    from mergepipe_pipeline.domain.plan import TensorTask


def _coefficients(scale: PerModel) -> tuple[float, ...]:
    return tuple(scale)


@operator(
    "passthrough",
    space="value",
    base="none",
    experts=(1, 1),
    formula="s·T",
    reference="https://github.com/arcee-ai/mergekit/blob/main/docs/merge_methods.md",
    hooks=Hooks(coefficients=_coefficients),
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
