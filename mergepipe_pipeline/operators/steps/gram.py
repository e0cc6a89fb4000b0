"""Inner products of models, and the sum with fixed factors that a merge on a sphere comes to.

Slerp, its relatives and model stock are one formula, c₀B + Σ cᵢXᵢ: the factors follow from lengths
and angles, that is from the Gram matrix of the models' tensors. It is measured in one pass
(`GRAM`), each method turns it into factors of its own (`Operator.settle`), and merging streams
(`combine`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators.steps.registry import Window
from mergepipe_pipeline.operators.steps.tensor_measures import Sums

if TYPE_CHECKING:
    from torch import Tensor


#: Relative spacing of float32: lengths and angles below it are rounding of the stored numbers.
SINGLE_EPS = 2.0**-23

# Sums of fewer than 32768 numbers are never split among threads, which would change their bits.
_PIECE_ELEMS = 1 << 14


def _pieces(stop: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, stop)) for start in range(0, stop, step))


def gram_of(rows: Sequence[Tensor]) -> Tensor:
    """⟨Xᵢ, Xⱼ⟩ of the float32 [n] `rows`, float64 [len(rows)²]."""
    count, n = len(rows), rows[0].shape[0]
    total = rows[0].new_zeros((count, count)).double()
    held = rows[0].new_empty((count, min(n, _PIECE_ELEMS))).double()  # room for one piece
    for piece in _pieces(n, _PIECE_ELEMS):
        part = held[:, : piece.stop - piece.start]
        for i, row in enumerate(rows):
            part[i].copy_(row[piece])
        for i in range(count):
            total[i, i:].add_((part[i:] * part[i]).sum(-1))  # the upper triangle's row, [count − i]
    return total.add(total.triu(1).T).flatten()


def _gram_of_experts(window: Window) -> Tensor:
    return gram_of(list(window.experts))


def _gram_with_base(window: Window) -> Tensor:
    assert window.base is not None
    return gram_of([window.base, *window.experts])


#: The Gram matrix of the experts, as deltas or values by the operator's space.
GRAM = Sums("gram", _gram_of_experts)
#: The same with the base as first row, for operators that interpolate from the base itself.
GRAM_WITH_BASE = Sums("gram_with_base", _gram_with_base)


def matrix(measured: Sequence[float], method: str) -> F64Array:
    """The Gram matrix [m, m] of a measured `GRAM`.

    Raises OperatorError if a model holds NaN or infinity, which have no direction.
    """
    size = isqrt(len(measured))
    gram = np.array(measured, dtype=np.float64).reshape(size, size)
    if not np.isfinite(gram).all():
        raise OperatorError(
            "The angle between models is not a number",
            where=method,
            expected="finite values in every model",
            found="inner products " + ", ".join(f"{g:.6g}" for g in measured),
            next_step="repair the model that holds NaN or infinity, or leave it out",
        )
    return gram


def settled(base: float, factors: Sequence[float] | F64Array) -> tuple[float, ...]:
    """Factors of base and experts as a task's facts: float32 numbers, as `combine` uses them.

    Rounding keeps the last bits of long sums, which differ among machines, out of plan ids.
    """
    return tuple(float(np.float32(f)) for f in (base, *factors))


def row_gram(window: Window) -> F64Array:
    """Inner products of the experts row by row, [K, K, rows].

    A row's numbers depend neither on the other rows of the window nor on threads.
    """
    count, width = window.experts.shape[0], max(1, window.row_elems)
    experts = window.experts.view(count, window.experts.shape[1] // width, width)
    total = experts.new_zeros((count, *experts.shape[:2])).double()  # [K, K, rows]
    for rows in _pieces(experts.shape[1], max(1, _PIECE_ELEMS // width)):
        for columns in _pieces(width, _PIECE_ELEMS):
            part = experts[:, rows, columns].double()  # [K, rows of the piece, columns of it]
            for i in range(count):
                total[i, i:, rows].add_((part[i:] * part[i]).sum(-1))
    gram: F64Array = total.cpu().numpy()
    for i in range(count):
        gram[i:, i] = gram[i, i:]
    return gram


def combine(window: Window) -> Tensor:
    """c₀B + Σ cᵢXᵢ with the task's facts (c₀, c₁ … c_K), [n] float32.

    Raises OperatorError if the plan brings no facts.
    """
    facts, n_experts = window.task.facts, window.experts.shape[0]
    if len(facts) != 1 + n_experts:
        raise OperatorError(
            f"{window.task.operator} has no factors to combine models with",
            where=f"tensor {window.task.name}",
            expected=f"{1 + n_experts} facts",
            found=f"{len(facts)} in the plan",
            next_step="analyze the models and plan again",
        )
    return combine_rows(window, facts[0], np.array(facts[1:])[:, None])


def combine_rows(window: Window, base_factor: float, factors: npt.NDArray[Any]) -> Tensor:
    """c₀B + Σ cᵢXᵢ with `factors` [K, rows], each for as many elements; [n] float32."""
    factor = window.experts.new_tensor(factors)[:, :, None]  # [K, rows, 1]
    return _combine(window, base_factor, window.experts.view(*factors.shape, -1), factor)


def combine_columns(window: Window, base_factor: float, factors: npt.NDArray[Any]) -> Tensor:
    """c₀B + Σ cᵢXᵢ with `factors` [K, columns] for every row alike; [n] float32."""
    factor = window.experts.new_tensor(factors)[:, None, :]  # [K, 1, columns]
    count, columns = factors.shape
    return _combine(window, base_factor, window.experts.view(count, -1, columns), factor)


def _combine(window: Window, base_factor: float, experts: Tensor, factor: Tensor) -> Tensor:
    """The sum for `experts` [K, …] and factors of a shape that spreads over them.

    Added up in recipe order, in the first expert's memory. Where the sum is zero of either sign
    and c₀ is 1, exactly the base's bits: −0 − 0 is −0, while −0 + 0 is not.
    """
    total = experts[0].mul_(factor[0])
    for k in range(1, experts.shape[0]):
        total.add_(experts[k].mul_(factor[k]))
    merged = total.view(-1)
    if window.base is None or base_factor == 0:
        return merged
    return window.base.mul(base_factor).sub_(merged.neg_().add_(0.0))
