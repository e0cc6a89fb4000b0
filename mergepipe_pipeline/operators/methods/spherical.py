"""Merges along great circles: slerp, nuslerp, multislerp and the Karcher mean.

Each takes a tensor as one vector, turns lengths and angles into one factor per model, and sums;
`gram` measures the one and does the other. The formulas are mergekit's, evaluated in float64 from
the Gram matrix. mergekit evaluates them on float32 tensors, so where it divides by what float32
cannot tell from zero, its results are rounding errors; the rules for that are stated below.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, F64Array
from mergepipe_pipeline.domain.operator import Response
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators.steps.gram import (
    GRAM,
    GRAM_WITH_BASE,
    SINGLE_EPS,
    combine,
    combine_columns,
    combine_rows,
    matrix,
    row_gram,
    settled,
)
from mergepipe_pipeline.operators.steps.registry import Hooks, PerModel, Weight, Window, operator
from mergepipe_pipeline.operators.steps.tensor_measures import Params, Sums

if TYPE_CHECKING:
    from torch import Tensor

_STRAIGHT_COSINE = 0.9995  # slerp: beyond it the arc is taken for its chord
_SLERP_MIN_NORM = 1e-8
_NUSLERP_MIN_NORM = 1e-7
_NUSLERP_MIN_WEIGHT = 1e-6
_NUSLERP_MIN_SINE = 1e-8


def _arc(cosine: F64Array, straight: BoolArray, t: float) -> tuple[F64Array, F64Array]:
    """Factors of both ends at the part `t` of the arc between them, of the chord if `straight`."""
    angle = np.arccos(np.where(straight, 0.0, cosine))
    sine = np.sin(angle)
    start = np.where(straight, 1.0 - t, np.sin((1.0 - t) * angle) / sine)
    return start, np.where(straight, t, np.sin(t * angle) / sine)


def _settle_slerp(measured: tuple[float, ...], t: float) -> tuple[float, ...]:
    gram = matrix(measured, "slerp")  # [2, 2]: base, expert
    norms = np.sqrt(gram.diagonal())
    norms = np.where(norms > _SLERP_MIN_NORM, norms, 1.0)
    cosine = np.clip(gram[0, 1] / (norms[0] * norms[1]), -1.0, 1.0)
    base, expert = _arc(cosine, np.abs(cosine) > _STRAIGHT_COSINE, t)
    return settled(float(base), [float(expert)])


@operator(
    "slerp",
    space="value",
    experts=(1, 1),
    formula="(sin((1−t)θ)B + sin(tθ)T) / sin θ, θ the angle between B and T; "
    "(1−t)B + tT if |cos θ| > 0.9995",
    reference="https://en.wikipedia.org/wiki/Slerp",
    measures=[GRAM_WITH_BASE],
    hooks=Hooks(settle=_settle_slerp),
)
def slerp(window: Window, *, t: Annotated[float, "0 is the base, 1 the other model"]) -> Tensor:
    """Point on the arc from the base to the expert; a tensor of zeros is at right angles to all.

    Source: https://en.wikipedia.org/wiki/Slerp, with both ends in their own length.
    """
    return combine(window)


def _nuslerp_factors(gram: F64Array, weight: PerModel) -> tuple[F64Array, F64Array]:
    """Factors of the two experts, from a Gram matrix [2, 2] or one per row [2, 2, rows].

    As in mergekit, vectors that float32 cannot tell from colinear ones count as colinear.
    """
    total = sum(weight)
    t = 0.5 if abs(total) < _NUSLERP_MIN_WEIGHT else weight[1] / total
    first, second = (np.maximum(np.sqrt(gram[i, i]), _NUSLERP_MIN_NORM) for i in (0, 1))
    cosine = np.clip(gram[0, 1] / (first * second), -1.0, 1.0)
    rounded = cosine.astype(np.float32)
    return _arc(cosine, 1 - rounded * rounded <= _NUSLERP_MIN_SINE**2, t)


def _nuslerp_response(nuslerp_flatten: bool, **_: object) -> Response:
    return "additive" if nuslerp_flatten else "unbounded"


def _by_column(params: Params) -> bool:
    return bool(params.get("nuslerp_row_wise")) and not params.get("nuslerp_flatten", True)


def _column_dots(window: Window) -> Tensor:
    """⟨X₁, X₁⟩, ⟨X₁, X₂⟩, ⟨X₂, X₂⟩ of every column, float64 [3 · columns]; [0] of a vector."""
    if len(window.task.shape) < 2:
        return window.experts.new_empty(0).double()
    first, second = window.experts.view(2, -1, window.row_elems).double()  # [rows, columns]
    products = (first.square(), first * second, second.square())
    dots = window.experts.new_empty((3, window.row_elems)).double()
    for row, product in zip(dots, products, strict=True):
        row.copy_(product.sum(0))
    return dots.flatten()


def _settle_nuslerp(
    measured: tuple[float, ...], weight: PerModel, nuslerp_flatten: bool, **_: object
) -> tuple[float, ...]:
    if nuslerp_flatten:
        factors = _nuslerp_factors(matrix(measured, "nuslerp"), weight)
        return settled(1.0, [float(f) for f in factors])
    if not measured:
        return ()
    first_sq, product, second_sq = np.array(measured).reshape(3, -1)  # [columns] each
    gram = np.stack([[first_sq, product], [product, second_sq]])  # [2, 2, columns]
    columns = _nuslerp_factors(gram, weight)
    return tuple(np.concatenate(columns).astype(np.float32).tolist())


@operator(
    "nuslerp",
    space="delta_if_base",
    base="optional",
    experts=(2, 2),
    scope="row",
    formula="B + (sin((1−t)θ)δ₁ + sin(tθ)δ₂) / sin θ, t = w₂/(w₁+w₂), θ the angle between "
    "δ₁ and δ₂, of the tensor or of each row; T for δ without a base; (1−t)δ₁ + tδ₂ if colinear",
    reference="https://github.com/arcee-ai/mergekit/blob/main/docs/merge_methods.md",
    measures=[
        replace(GRAM, needed=lambda params: bool(params.get("nuslerp_flatten", True))),
        Sums("gram-columns", _column_dots, needed=_by_column),
    ],
    hooks=Hooks(settle=_settle_nuslerp, response=_nuslerp_response),
)
def nuslerp(
    window: Window,
    *,
    weight: Weight,
    nuslerp_flatten: Annotated[bool, "take a tensor as one vector, not row by row"] = True,
    nuslerp_row_wise: Annotated[bool, "without flatten: take columns, not rows"] = False,
) -> Tensor:
    """Point on the arc between two experts, or between their deltas on the base.

    Weights that cancel mean the middle. Source: mergekit's nuslerp.
    """
    if nuslerp_flatten:
        return combine(window)
    if window.task.facts:
        return combine_columns(window, 1.0, np.array(window.task.facts).reshape(2, -1))
    with np.errstate(invalid="ignore"):  # a row with NaN or infinity is NaN in the end
        factors = _nuslerp_factors(row_gram(window), weight)
    return combine_rows(window, 1.0, np.stack(factors).astype(np.float32))


def _check_multislerp(
    tensor: str,
    shape: tuple[int, ...],
    weight: PerModel,
    normalize_weights: bool,
    eps: float,
) -> None:
    total, size = sum(weight), sum(abs(w) for w in weight)
    if normalize_weights and len(weight) > 1 and abs(total) <= SINGLE_EPS * size:
        raise OperatorError(
            "The weights of a multislerp sum to zero",
            where=f"tensor {tensor}",
            expected="a sum to divide by",
            found=f"weights {list(weight)}",
            next_step="change a weight, or set normalize_weights: false",
        )
    if eps < 0:
        raise OperatorError(
            "multislerp cannot use its parameter 'eps'",
            where=f"tensor {tensor}",
            expected="a length of 0 or more",
            found=repr(eps),
            next_step="leave out eps for its default",
        )


def _settle_multislerp(
    measured: tuple[float, ...], weight: PerModel, normalize_weights: bool, eps: float
) -> tuple[float, ...]:
    """Factors wᵢ / (‖Xᵢ‖ M) · cos ε · Σ wⱼ‖Xⱼ‖, with M the length of Σ wᵢXᵢ/‖Xᵢ‖.

    The average in the tangent space of the mean direction m is zero: Σ wᵢ(ûᵢ − (ûᵢ·m)m) =
    Mm − (Mm·m)m. What is left of the exponential map is the cosine of its guard against zero.
    """
    gram = matrix(measured, "multislerp")
    weights = np.array(weight)
    if len(weights) == 1:
        return settled(1.0, [1.0])
    if normalize_weights:
        weights = weights / weights.sum()
    norms = np.sqrt(gram.diagonal())
    inverse = np.divide(1.0, norms + eps, out=np.zeros_like(norms), where=norms > 0)
    mix = weights * inverse  # [K]: Σ mixᵢXᵢ is the mean of the directions
    length = float(np.sqrt(np.maximum(mix @ gram @ mix, 0.0)))
    if length >= max(eps, SINGLE_EPS * float(np.abs(mix) @ norms)) and length > 0:
        return settled(1.0, mix / length * np.cos(eps) * (weights @ norms))
    if len(weights) == 2 or bool((norms <= eps).all()):
        return settled(1.0, weights)
    raise OperatorError(
        "The directions of the models cancel, so that their mean points nowhere",
        where="multislerp",
        expected=f"a weighted mean direction longer than {max(eps, SINGLE_EPS):.3g}",
        found=f"length {length:.3g} for weights {list(weight)}",
        next_step="change the weights, or leave a model out",
    )


@operator(
    "multislerp",
    space="delta_if_base",
    base="optional",
    formula="B + m Σ wᵢ‖δᵢ‖, m the direction of Σ wᵢδᵢ/‖δᵢ‖, wᵢ divided by Σ wᵢ if "
    "normalize_weights; T for δ without a base",
    reference="https://goddard.blog/posts/multislerp-wow-what-a-cool-idea",
    measures=[GRAM],
    hooks=Hooks(check=_check_multislerp, settle=_settle_multislerp),
)
def multislerp(
    window: Window,
    *,
    weight: Weight,
    normalize_weights: Annotated[bool, "divide the weights by their sum"] = True,
    eps: Annotated[float, "length below which a vector counts as zero"] = 1e-8,
) -> Tensor:
    """Weighted mean direction of the experts, or of their deltas, in their mean length.

    Linear where the directions of two cancel, and where all deltas are zero (mergekit refuses
    more than two of those). Cancel means: within float32 rounding, or below eps.
    Source: https://goddard.blog/posts/multislerp-wow-what-a-cool-idea.
    """
    return combine(window)


def _karcher_mean(cosines: F64Array, max_iter: int, tol: float) -> F64Array:
    """Factors of unit vectors with the given `cosines` [m, m] in their mean on the sphere.

    Neither a vector at the mean nor its antipode says where to go: both are skipped.
    """
    share = 1.0 / len(cosines)

    def length(factors: F64Array) -> float:
        return float(np.sqrt(np.maximum(factors @ cosines @ factors, 0.0)))

    # A vector is given by its factors of the m units, so that lengths and angles need only cosines.
    units = np.eye(len(cosines))  # [m, m]
    mean = np.full(len(cosines), share)  # [m]
    mean = mean / length(mean) if length(mean) >= tol else units[0]
    for _ in range(max_iter):
        tangent = np.zeros(len(cosines))
        for unit, dot in zip(units, np.clip(cosines @ mean, -1.0, 1.0), strict=True):
            angle = float(np.arccos(dot))
            if tol <= angle <= np.pi - tol:
                tangent += share * angle / np.sin(angle) * (unit - dot * mean)
        step = length(tangent)
        if step < tol:
            break
        mean = np.cos(step) * mean + np.sin(step) / step * tangent
        mean = mean / length(mean)
    return mean


def _settle_karcher(measured: tuple[float, ...], max_iter: int, tol: float) -> tuple[float, ...]:
    gram = matrix(measured, "karcher")
    norms = np.sqrt(gram.diagonal())
    if len(norms) == 1:
        return settled(0.0, [1.0])
    factors = np.zeros_like(norms)
    (valid,) = np.nonzero(norms > max(tol, 0.0))  # models that have a direction
    if len(valid):
        lengths = norms[valid]
        cosines = gram[np.ix_(valid, valid)] / np.outer(lengths, lengths)  # [m, m]
        mean = _karcher_mean(cosines, max_iter, max(tol, SINGLE_EPS))
        factors[valid] = norms.mean() * mean / lengths
    return settled(0.0, factors)


@operator(
    "karcher",
    space="value",
    base="none",
    formula="u Σ ‖Tᵢ‖/n, u the point of the unit sphere with the least sum of squared angles to "
    "Tᵢ/‖Tᵢ‖, by max_iter steps from their mean",
    reference="https://arxiv.org/abs/2603.04972",
    measures=[GRAM],
    hooks=Hooks(settle=_settle_karcher),
)
def karcher(
    window: Window,
    *,
    max_iter: Annotated[int, "most steps towards the mean"] = 10,
    tol: Annotated[float, "length of a step, angle or tensor that counts as zero"] = 1e-5,
) -> Tensor:
    """Mean direction of all models on the sphere, in their mean length.

    Tensors of zeros have no direction but count in the mean length; all zeros give zeros.
    Source: Karcher 1977; https://arxiv.org/abs/2603.04972.
    """
    return combine(window)
