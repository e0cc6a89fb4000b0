"""Arcee Fusion: take a model's element where its importance stands out in the tensor.

Importance is |δ| times how far the model's row, as a distribution, diverges from the base's. One
pass over a tensor measures its quartiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mergepipe_pipeline.operators.steps import mix
from mergepipe_pipeline.operators.steps.registry import Hooks, Window, operator
from mergepipe_pipeline.operators.steps.tensor_measures import Quantiles

if TYPE_CHECKING:
    from torch import Tensor

#: Added to every probability.
LEAST_PROBABILITY = 1e-8


def _importance(window: Window) -> Tensor:
    """|δ|·KL(softmax T ‖ softmax B) of each element's row, [n] float32, none negative and no NaN.

    The divergence is taken in float64: of small deltas most of it is rounding in float32, which is
    mergekit's default. Below zero it counts as zero.
    """
    assert window.base is not None
    # Rows [r, row_elems] in float64.
    expert, base = (v.view(-1, window.row_elems).double() for v in (window.experts[0], window.base))
    p = expert.softmax(1).add_(LEAST_PROBABILITY)
    q = base.softmax(1).add_(LEAST_PROBABILITY)
    divergence = _row_sums_(p.div(q).log_().mul_(p))  # [r, 1]
    importance = divergence.mul(expert.sub(base).abs_()).clamp_(min=0)
    inf = float("inf")  # −0, which abs_ ends, and NaN have no place in the order of bit patterns
    return importance.abs_().float().nan_to_num_(nan=inf, posinf=inf).view(-1)


def _row_sums_(rows: Tensor) -> Tensor:
    """[r, 1]: sums of [r, n] along rows, halves added onto each other in its memory.

    The order depends on n alone; `sum` splits a single long row among threads.
    """
    while (n := rows.shape[1]) > 1:
        kept = (n + 1) // 2
        rows[:, : n - kept].add_(rows[:, kept:])
        rows = rows[:, :kept]
    return rows


def _ranks(numel: int) -> tuple[int, ...]:
    return tuple(int(share * (numel - 1)) for share in (0.25, 0.5, 0.75))


def _settle(measured: tuple[float, ...]) -> tuple[float, ...]:
    """The threshold median + 1.5·(q₃ − q₁), rounded as mergekit rounds: every step to float32."""
    first, median, third = (np.float32(value) for value in measured)
    return (float(median + np.float32(1.5) * (third - first)),)


def _coefficients() -> tuple[float, ...]:
    return (1.0,)


@operator(
    "arcee_fusion",
    space="value",
    experts=(1, 1),
    scope="row",
    response="unbounded",
    formula="B + δ[importance ≥ median + 1.5·(q₃ − q₁)], quartiles over the tensor; "
    "importance = |δ|·KL(softmax T + 1e-8 ‖ softmax B + 1e-8) over the last dimension",
    reference="https://arcee.ai",
    measures=(Quantiles("arcee-importance", _importance, _ranks),),
    hooks=Hooks(coefficients=_coefficients, settle=_settle),
)
def arcee_fusion(window: Window) -> Tensor:
    """The base, and the model's elements where their importance reaches the threshold."""
    assert window.base is not None
    (threshold,) = window.task.facts
    keep = _importance(window).ge_(threshold)
    return mix.add_base(window, window.experts[0].sub_(window.base).mul_(keep))
