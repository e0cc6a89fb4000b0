"""Model stock: how far to go from the base to the mean of the experts, by the angles between them.

The angles come from the Gram matrix of the deltas, of whole tensors (`gram` measures it) or of
rows (computed within the window).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Annotated

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.domain.operator import Response
from mergepipe_pipeline.operators.steps.gram import (
    GRAM,
    combine,
    combine_rows,
    matrix,
    row_gram,
    settled,
)
from mergepipe_pipeline.operators.steps.registry import Hooks, Window, operator

if TYPE_CHECKING:
    from torch import Tensor

_MIN_NORM_PRODUCT = 1e-6
_SINGULAR = 1e-6


def _shares(gram: F64Array) -> F64Array:
    """Factor of each expert, [K, …] all equal, from deltas' inner products [K, K, …]."""
    count = len(gram)
    norms = np.sqrt(gram[np.arange(count), np.arange(count)])  # [K, …]
    pairs = list(combinations(range(count), 2))
    cosine = np.zeros_like(norms[0])  # […]: one for the tensor, or one for each row
    for i, j in pairs:
        product = np.maximum(norms[i] * norms[j], _MIN_NORM_PRODUCT)
        cosine = cosine + np.clip(gram[i, j] / product, -1.0, 1.0)
    cosine = cosine / len(pairs)
    denominator = 1.0 + (count - 1) * cosine
    singular = np.abs(denominator) < _SINGULAR
    share = np.where(singular, 0.0, cosine / np.where(singular, 1.0, denominator))
    return np.stack([share] * count)


def _response(filter_wise: bool) -> Response:
    return "unbounded" if filter_wise else "additive"


def _settle(measured: tuple[float, ...], filter_wise: bool) -> tuple[float, ...]:
    if filter_wise:
        return ()
    return settled(1.0, _shares(matrix(measured, "model_stock")))


@operator(
    "model_stock",
    experts=(2, None),
    scope="row",
    formula="B + t Σ δᵢ/n, t = n cos θ / (1 + (n−1) cos θ), cos θ the mean cosine of two deltas, "
    "of the tensor or of each row; B where the divisor vanishes",
    reference="https://arxiv.org/abs/2403.19522",
    measures=[replace(GRAM, needed=lambda params: not params.get("filter_wise", False))],
    hooks=Hooks(settle=_settle, response=_response),
)
def model_stock(
    window: Window,
    *,
    filter_wise: Annotated[bool, "an angle for each row, not one for the tensor"] = False,
) -> Tensor:
    """Interpolate between the base and the experts' mean; deltas at right angles give the base.

    Source: Model Stock (https://arxiv.org/abs/2403.19522), with mergekit's mean of the cosines.
    """
    if not filter_wise:
        return combine(window)
    with np.errstate(invalid="ignore"):  # a row with NaN or infinity is NaN in the end
        factors = _shares(row_gram(window))
    return combine_rows(window, 1.0, factors.astype(np.float32))
