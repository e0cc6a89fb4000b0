"""The mean of models by their exact sum, so that no order of them changes a bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mergepipe_pipeline.operators.steps.exact import mean_of
from mergepipe_pipeline.operators.steps.registry import Window, operator

if TYPE_CHECKING:
    from torch import Tensor


@operator(
    "mean",
    space="value",
    base="none",
    formula="Σ Tᵢ / n, the sum exact",
    reference="https://arxiv.org/abs/2203.05482",
)
def mean(window: Window) -> Tensor:
    """The uniform mean of the experts' values, from their exact sum, rounded at the end.

    A window over a training run slides by it: the sum less the oldest and more the newest is the
    sum of all. Source: Model soups (https://arxiv.org/abs/2203.05482).
    """
    import torch

    return torch.from_numpy(mean_of(window.experts.numpy())[0])
