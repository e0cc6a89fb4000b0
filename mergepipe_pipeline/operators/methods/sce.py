"""SCE: select elements by variance across experts, weigh experts by length, elect signs.

Two passes over a tensor come first: which variances are the largest, and each expert's squared norm
in those elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mergepipe_pipeline.operators.steps import mix
from mergepipe_pipeline.operators.steps.registry import Hooks, Int8Mask, Window, operator
from mergepipe_pipeline.operators.steps.tensor_measures import Largest, Sums

if TYPE_CHECKING:
    from torch import Tensor

TOPK = 1.0
#: Below this sum of mean squares the weights are uniform.
LEAST_MEAN_SQUARE = 1e-6
#: No variance is above it (the largest float32), so this threshold selects nothing.
MOST = 3.4028234663852886e38
#: The sum of agreeing weights counts as at least this much.
LEAST_WEIGHT = 1e-6


def _variance(window: Window) -> Tensor:
    """Population variance over experts, [n] float32; the largest number where it is none.

    Welford's update in float64: zero, exactly, where all experts are equal.
    """
    mean = window.experts[0].double()  # [n]
    squares = mean.new_zeros(mean.shape)
    for k in range(1, window.experts.shape[0]):
        deviation = window.experts[k].double().sub_(mean)
        mean.add_(deviation.div(mean.new_full((), k + 1)))
        # Welford's (x − old mean)·(x − new mean) is (k / (k + 1))·deviation².
        squares.add_(deviation.square_().mul_(k / (k + 1)))
    count = mean.new_full((), window.experts.shape[0])  # as a tensor: see `mix.summed`
    return squares.div_(count).float().nan_to_num_(nan=MOST, posinf=MOST)


def _count(
    numel: int,
    nonzero: int,
    facts: tuple[float, ...],
    params: dict[str, float | bool | int | str],
) -> int:
    topk = float(params.get("select_topk", TOPK))
    return nonzero if topk >= 1 else int(nonzero * max(topk, 0.0))


def _select_(window: Window, select_topk: float) -> None:
    """Zero the elements of all experts whose variance is not among the selected."""
    if select_topk >= 1:
        return
    threshold, tie_stop_elem = window.task.facts[:2]
    variance = _variance(window)
    n = variance.shape[0]
    cut = min(max(int(tie_stop_elem) - window.start_elem, 0), n)
    variance[:cut].ge_(threshold)
    variance[cut:].gt_(threshold)
    window.experts.mul_(variance)


def _sq_norms(window: Window) -> Tensor:
    """Float64 [K + 1]: each expert's Σ δ² over the selected elements, and the elements in all."""
    _select_(window, float(dict(window.task.params).get("select_topk", TOPK)))
    n_experts, n = window.experts.shape
    sums = window.experts.new_full((n_experts + 1,), n).double()  # [K + 1], n in its last place
    sums[:n_experts] = window.experts.double().square_().sum(1)
    return sums


def _settle(measured: tuple[float, ...], select_topk: float, int8_mask: bool) -> tuple[float, ...]:
    """Threshold and tie stop as measured, then one weight per expert; the weights sum to one."""
    threshold, tie_stop_elem, *sq_norms, numel = measured
    total = sum(sq_norms)
    if total < LEAST_MEAN_SQUARE * numel:
        weights = [1 / len(sq_norms)] * len(sq_norms)
    else:
        weights = [sq_norm / total for sq_norm in sq_norms]
    return min(threshold, MOST), tie_stop_elem, *weights


@operator(
    "sce",
    response="mean",
    approximates_by_request=True,  # variances of approximated elements tie, and their rank decides
    formula="δᵢ only where their variance is among the int(nonzero·topk) largest; wᵢ = mean δᵢ² "
    "over the sum of these, uniform if that is below 1e-6; s = sign Σ δᵢ (0 is +); "
    "B + Σ wᵢδᵢ[sign δᵢ = s] / max(Σ wᵢ[sign δᵢ = s], 1e-6)",
    reference="https://arxiv.org/abs/2408.07990",
    measures=(
        Largest(
            "sce-variance",
            _variance,
            _count,
            depends=("select_topk",),
            needed=lambda params: float(params.get("select_topk", TOPK)) < 1,
            skipped=(0.0, 0.0),
        ),
        Sums("sce-energies", _sq_norms, depends=("select_topk",)),
    ),
    hooks=Hooks(settle=_settle),
)
def sce(
    window: Window,
    *,
    select_topk: Annotated[float, "share of the elements whose variance is largest"] = TOPK,
    int8_mask: Int8Mask = False,
) -> Tensor:
    """Select by variance, weigh by squared norm, mix what agrees with the elected sign.

    Source: https://arxiv.org/abs/2408.07990, per tensor as in mergekit.
    """
    weight = window.task.facts[2:]  # one per expert
    _select_(window, select_topk)  # δᵢ [K, n]
    sign = mix.elect_(window.experts)  # [n]; the experts [K, n] become |δᵢ| where they agree, or 0
    divisor = window.experts[0].sign().mul_(weight[0])  # [n]: Σ of the weights that agree
    total = window.experts[0].mul_(weight[0])  # [n]: Σ wᵢ|δᵢ| of these
    for k in range(1, len(weight)):
        agreeing = window.experts[k]
        divisor.add_(agreeing.sign().mul_(weight[k]))
        total.add_(agreeing.mul_(weight[k]))
    return mix.add_base(window, total.div_(divisor.clamp_(min=LEAST_WEIGHT)).mul_(sign))
