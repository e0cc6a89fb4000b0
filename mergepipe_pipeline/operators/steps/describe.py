"""How methods on task vectors describe themselves to the compiled kernel: the steps of `mix` and
`sparsify`, as data.

It follows the torch functions step by step; the tests hold the two to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe_pipeline.domain.operator import Fact
from mergepipe_pipeline.domain.plan import TensorTask
from mergepipe_pipeline.operators.steps.fused import FusedMerge, FusedRow
from mergepipe_pipeline.operators.steps.mix import SUM_EPSILON, summed
from mergepipe_pipeline.operators.steps.random import keep_below, stream_key
from mergepipe_pipeline.operators.steps.signature import PerModel
from mergepipe_pipeline.operators.steps.sparsify import trim_rule


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
