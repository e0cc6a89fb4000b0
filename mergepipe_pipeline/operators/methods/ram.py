"""Reinforced Agent Merging: keep what one model alone changed, average what several did.

`ramplus_tl` makes up to each model for what is averaged away, by a factor from counts over the
whole tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np

from mergepipe_pipeline.operators.steps import mix
from mergepipe_pipeline.operators.steps.registry import AtLeast, Hooks, Window, operator
from mergepipe_pipeline.operators.steps.tensor_measures import Sums

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-5

Epsilon = Annotated[float, "largest |δ| that counts as no change"]


def _count_changes(changed: Tensor) -> Tensor:
    """Σ over experts of ones and zeros, [K, n] to [n]."""
    count = changed[0].clone()
    for k in range(1, changed.shape[0]):
        count.add_(changed[k])
    return count


def _merge(window: Window, epsilon: float, unique_factors: tuple[float, ...]) -> Tensor:
    """B plus the mean of the changes of each element, times a factor where an expert is alone."""
    experts = window.experts
    changed = experts.abs().gt_(epsilon)  # [K, n] of ones and zeros
    experts.mul_(changed)
    count = _count_changes(changed)  # [n]: how many experts change the element
    alone = count.eq(1).to(count.dtype)  # [n] of ones and zeros
    shared = alone.neg().add_(1)  # [n]: the other elements
    count.clamp_(min=1)
    for k, factor in enumerate(unique_factors):
        experts[k].div_(count)
        if factor != 1:
            experts[k].mul_(alone.mul(factor).add_(shared))
    total = experts[0]
    for k in range(1, len(unique_factors)):
        total.add_(experts[k])
    return mix.add_base(window, total)


def _counts(window: Window) -> Tensor:
    """Float64 [2K]: how many elements each expert changes with others, then those alone."""
    epsilon = float(dict(window.task.params).get("epsilon", EPSILON))
    n_experts = window.experts.shape[0]
    changed = window.experts.abs().gt_(epsilon)  # [K, n]
    count = _count_changes(changed)  # [n]
    sums = changed.new_empty(2 * n_experts).double()
    sums[n_experts:] = changed.mul(count.eq(1)).double().sum(1)
    sums[:n_experts] = changed.mul_(count.gt(1)).double().sum(1)
    return sums


def _settle(
    measured: tuple[float, ...], r: float, alpha: float, epsilon: float
) -> tuple[float, ...]:
    """1 for the base, then λᵢ of each expert, as mergekit rounds them: every step to float32."""
    n_experts = len(measured) // 2
    factors = []
    for shared, alone in zip(measured[:n_experts], measured[n_experts:], strict=True):
        divisor = np.float32(max(alone, epsilon))
        # Without a change of its own an expert has as much in common as it can have.
        ratio = np.float32(shared) / divisor if divisor > 0 else np.float32(alpha * (shared > 0))
        factors.append(float(1 + np.float32(r) * min(max(ratio, np.float32(0)), np.float32(alpha))))
    return 1.0, *factors


@operator(
    "ram",
    response="mean",
    formula="B + Σ δᵢ[|δᵢ| > ε] / max(1, number of |δᵢ| > ε)",
    reference="https://arxiv.org/abs/2601.13572",
)
def ram(window: Window, *, epsilon: Epsilon = EPSILON) -> Tensor:
    """Mean of the deltas that are changes. Source: https://arxiv.org/abs/2601.13572."""
    return _merge(window, epsilon, (1.0,) * window.experts.shape[0])


@operator(
    "ramplus_tl",
    response="vote",
    formula="as ram, times λᵢ = 1 + r·clamp(sharedᵢ / aloneᵢ, 0, α) where expert i is alone; "
    "sharedᵢ and aloneᵢ count the tensor's elements that it changes with others and alone",
    reference="https://arxiv.org/abs/2601.13572",
    measures=(Sums("ram-counts", _counts, depends=("epsilon",)),),
    hooks=Hooks(settle=_settle),
)
def ramplus_tl(
    window: Window,
    *,
    r: Annotated[
        float, "strength of the factor for changes that an expert makes alone", AtLeast(0)
    ] = 0.1,
    alpha: Annotated[
        float, "largest ratio of shared to lone changes that counts", AtLeast(0)
    ] = 0.2,
    epsilon: Epsilon = EPSILON,
) -> Tensor:
    """Mean of shared changes, lone ones scaled up per tensor. Source: as for ram."""
    return _merge(window, epsilon, window.task.facts[1:])
