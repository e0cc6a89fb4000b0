"""NearSwap: move the base to a model where the two are near, less the farther they are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mergepipe_pipeline.operators.steps import mix
from mergepipe_pipeline.operators.steps.registry import Hooks, Window, operator

if TYPE_CHECKING:
    from torch import Tensor

#: Distances count as at least this much.
NEAREST = 1e-6


def _coefficients(t: float) -> tuple[float, ...]:
    return (1.0,)


@operator(
    "nearswap",
    experts=(1, 1),
    response="mean",
    formula="B + δ·clamp(t / max(|δ|, 1e-6), 0, 1)",
    reference="https://huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001",
    hooks=Hooks(coefficients=_coefficients),
)
def nearswap(
    window: Window,
    *,
    t: Annotated[float, "distance up to which the model's element is taken whole"],
) -> Tensor:
    """The base plus each delta, cut at the length t.

    Source: https://huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001.
    """
    (delta,) = window.experts
    share = delta.new_full((), t).div(delta.abs().clamp_(min=NEAREST)).clamp_(0, 1)
    return mix.add_base(window, delta.mul_(share))
