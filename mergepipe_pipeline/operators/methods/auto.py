"""`auto`: per tensor the operator that fits how its experts conflict.

The conflict-aware choice of the MergePipe papers, with conflict measured where it is: on deltas,
not on weights, which are always alike. Chooses only; `task_arithmetic` and its relatives merge.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.domain.operator import Choosing
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators.steps.gram import gram_of
from mergepipe_pipeline.operators.steps.registry import (
    Density,
    Hooks,
    Lambda,
    PerModel,
    Weight,
    Window,
    operator,
)
from mergepipe_pipeline.operators.steps.tensor_measures import Sums

if TYPE_CHECKING:
    from torch import Tensor

DENSITY = PerModel((0.5,))


def _conflict(window: Window) -> Tensor:
    """Gram matrix of the deltas [K²], Σ B², and pairs of deltas with equal signs, and all pairs.

    Only elements that are not zero make pairs. Float64 [K² + 3].
    """
    assert window.base is not None
    signs = window.experts.sign()  # [K, n]
    positive = signs.clamp(min=0).sum(0)  # [n]: experts with δ > 0
    negative = signs.clamp(max=0).neg_().sum(0)  # [n]
    changed = positive + negative
    # Ordered pairs of different experts, [n]: twice what is meant, in both sums alike.
    equal = positive * (positive - 1) + negative * (negative - 1)
    pairs = changed * (changed - 1)
    gram = gram_of(list(window.experts))
    ends = [window.base.double().square().sum(), equal.double().sum(), pairs.double().sum()]
    return gram.new_tensor([*gram.tolist(), *(float(e) for e in ends)])


def _choose(
    facts: tuple[float, ...],
    weight: PerModel,
    density: PerModel,
    lambda_: float,
    keep_below: float,
    agree_above: float,
    oppose_below: float,
) -> Choosing:
    *products, base_sq, equal, pairs = facts
    gram = np.array(products).reshape(len(weight), len(weight))  # [K, K]
    size = math.sqrt(float(np.trace(gram)) / len(weight) / base_sq) if base_sq else math.inf
    if not np.trace(gram) > 0 or size < keep_below:
        reason = f"KEEP: the deltas are {size:.2g} of the base"
        return Choosing(operator="copy", params=(), model_params=(), reason=reason)
    cosine, alike = _mean_cosine(gram), equal / pairs if pairs else 1.0
    seen = f"mean cosine {cosine:+.3f}, {100 * alike:.0f} % of signs agree"
    params: Params = (("normalize", True), ("lambda", lambda_))
    weights = [("weight", w) for w in weight]
    sparse = tuple((w, ("density", d)) for w, d in zip(weights, density, strict=True))
    if len(weight) == 1 or cosine >= agree_above:
        whole = tuple((w,) for w in weights)
        return Choosing("task_arithmetic", params, model_params=whole, reason=f"AVG: {seen}")
    if cosine < oppose_below or alike < 0.5 + oppose_below:
        return Choosing("ties", params, model_params=sparse, reason=f"TIES: {seen}")
    params = (("normalize", True), ("rescale", True), ("lambda", lambda_))
    return Choosing("dare_linear", params, model_params=sparse, reason=f"DARE: {seen}")


def _mean_cosine(gram: F64Array) -> float:
    """Mean cosine of the pairs of deltas that are not zero; 1 if there is no pair."""
    norms = np.sqrt(gram.diagonal())
    alive = np.flatnonzero(norms > 0)  # [a] of K experts
    if len(alive) < 2:
        return 1.0
    cosines = gram[np.ix_(alive, alive)] / np.outer(norms[alive], norms[alive])
    return float(cosines[np.triu_indices(len(alive), 1)].mean())


def _coefficients(weight: PerModel, **_: object) -> tuple[float, ...]:
    return tuple(weight)


@operator(
    "auto",
    formula="KEEP if ‖δ‖/‖B‖ < keep_below; AVG (normalised task_arithmetic) if the deltas' mean "
    "cosine ≥ agree_above; TIES if it is < oppose_below or their signs agree less than by chance; "
    "else DARE (dare_linear, normalised)",
    reference="https://arxiv.org/abs/2602.13273",
    measures=(Sums("conflict", _conflict),),
    hooks=Hooks(coefficients=_coefficients, choose=_choose),
)
def auto(
    window: Window,
    *,
    weight: Weight,
    density: Density = DENSITY,
    lambda_: Lambda = 1.0,
    keep_below: Annotated[float, "size of deltas, relative to the base, that is not merged"] = 1e-6,
    agree_above: Annotated[float, "mean cosine of deltas that counts as agreement"] = 0.5,
    oppose_below: Annotated[float, "mean cosine of deltas that counts as conflict"] = -0.02,
) -> Tensor:
    """Chooses an operator per tensor; a plan names the chosen one, with the reason.

    Raises OperatorError: it never merges itself.
    Source: MergePipe (https://arxiv.org/abs/2602.13273), whose conflict is of weights.
    """
    raise OperatorError(
        "auto chooses an operator and is none itself",
        where=f"tensor {window.task.name}",
        expected="a plan with the operator that was chosen",
        found="a task with operator auto",
        next_step="make the plan again; if this stays, report it",
    )
