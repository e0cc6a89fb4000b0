"""A merge of task vectors as data: what a compiled kernel does to a window in one go.

Operators of the task arithmetic family describe their steps of `mix` and `sparsify` so; `apply` in
torch defines the result, and gives the same bits. No arithmetic here and no torch:
`kernels.merge_tiles` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mergepipe_pipeline.domain.operator import Fact
from mergepipe_pipeline.domain.plan import TensorTask, TrimRule
from mergepipe_pipeline.operators.steps.mix import SUM_EPSILON, summed
from mergepipe_pipeline.operators.steps.random import keep_below, stream_key
from mergepipe_pipeline.operators.steps.registry import PerModel
from mergepipe_pipeline.operators.steps.sparsify import trim_rule

#: Σ wᵢTᵢ in fused multiply-adds; B + λ Σ d̃ᵢ; B + λ · the sum of what has the elected sign.
Mix = Literal["values", "sum", "vote"]


@dataclass(frozen=True, slots=True)
class FusedRow:
    """The steps on one expert's δ, in this order; None or 1 leave a step out.

    Keep what `trim` keeps; drop what `outliers` keeps; keep elements whose number in the random
    `stream` is below `keep_below`; multiply by `scale`; divide by `divisor`; multiply by `weight`.
    All numbers as float32.
    """

    weight: float
    trim: TrimRule | None = None
    outliers: TrimRule | None = None
    stream: int | None = None
    keep_below: int = 0
    scale: float = 1.0
    divisor: float = 1.0


@dataclass(frozen=True, slots=True)
class FusedMerge:
    """The whole merge of one tensor; `rows` None for an expert that adds nothing.

    "values" and "sum" are divided by `divisor`; a "vote", if `normalize`, by the sum of the weights
    that agree. `lambda_` scales an update, not values.
    """

    mix: Mix
    rows: tuple[FusedRow | None, ...]
    divisor: float = 1.0
    normalize: bool = False
    lambda_: float = 1.0


def update(
    rows: Sequence[FusedRow | None], weight: PerModel, normalize: bool, lambda_: float
) -> FusedMerge:
    """B + λ Σ d̃ᵢ, as `mix.linear_sum`."""
    divisor = summed(weight, at_least=SUM_EPSILON) if normalize else 1.0
    return FusedMerge("sum", tuple(rows), divisor, lambda_=lambda_)


def vote(rows: Sequence[FusedRow | None], normalize: bool, lambda_: float) -> FusedMerge:
    """B + λ · the sum of what has the elected sign, as `mix.elected_sum`."""
    return FusedMerge("vote", tuple(rows), normalize=normalize, lambda_=lambda_)


def values(weight: PerModel, normalize: bool) -> FusedMerge:
    """Σ wᵢTᵢ, as `linear`."""
    divisor = summed(weight, at_least=0) if normalize else 1.0
    return FusedMerge("values", tuple(FusedRow(w) for w in weight), divisor)


def sparsified(
    task: TensorTask,
    weight: PerModel,
    density: PerModel,
    how: Fact,
    *,
    rescale: bool = False,
    inverse: bool = False,
) -> list[FusedRow | None]:
    """Rows that are trimmed, cut to a band or dropped from, then rescaled and weighted.

    Rescaled to their L1 norm by the factor in the plan, or, if `inverse`, divided by their density.
    Raises OperatorError if a trim lacks its rule.
    """
    return [
        _row(task, k, weight[k], share, how, rescale=rescale, inverse=inverse)
        for k, share in enumerate(density)
    ]


def _row(
    task: TensorTask,
    k: int,
    weight: float,
    share: float,
    how: Fact,
    *,
    rescale: bool,
    inverse: bool,
) -> FusedRow | None:
    if share <= 0:
        return None
    if share >= 1:
        return FusedRow(weight)
    expert = task.experts[k]
    limit = keep_below(share)
    is_trimmed, is_dropped = how in ("trim", "band"), how == "drop" and limit < 2**32
    return FusedRow(
        weight,
        trim=trim_rule(task, k, share) if is_trimmed else None,
        outliers=expert.outliers if how == "band" else None,
        stream=int(stream_key(task.seed, expert.position, task.name)) if is_dropped else None,
        keep_below=limit if is_dropped else 0,
        scale=expert.scale if rescale and not inverse else 1.0,
        divisor=share if rescale and inverse else 1.0,
    )
