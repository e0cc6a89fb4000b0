"""A merge of task vectors as data: what a compiled kernel does to a window in one go.

Operators of the task arithmetic family describe their steps of `mix` and `sparsify` so; `apply` in
torch defines the result, and gives the same bits. No arithmetic here and no torch:
`kernels.merge_tiles` computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import BoolArray
from mergepipe_pipeline.domain.operator import Fact
from mergepipe_pipeline.domain.plan import TensorTask
from mergepipe_pipeline.operators.kernels.mixing import ROW, Mixing
from mergepipe_pipeline.operators.steps.mix import SUM_EPSILON, summed
from mergepipe_pipeline.operators.steps.random import keep_below, stream_key
from mergepipe_pipeline.operators.steps.registry import PerModel
from mergepipe_pipeline.operators.steps.sparsify import trim_rule


@dataclass(frozen=True, slots=True)
class FusedMerge:
    """The whole merge of one tensor: an update, or Σ wᵢTᵢ over the divisor.

    `rows` [K] are of type ROW; of these, those that are not `adding` [K] are of no meaning.
    """

    rows: npt.NDArray[np.void]
    adding: BoolArray
    mixing: Mixing
    is_update: bool = True


def summing(weight: PerModel, normalize: bool, lambda_: float) -> Mixing:
    """B + λ Σ d̃ᵢ, as `mix.linear_sum`."""
    divisor = summed(weight, at_least=SUM_EPSILON) if normalize else 1.0
    return Mixing(False, False, np.float32(divisor), np.float32(-lambda_))


def voting(normalize: bool, lambda_: float) -> Mixing:
    """B + λ · the sum of what has the elected sign, as `mix.elected_sum`."""
    return Mixing(True, normalize, np.float32(1), np.float32(-lambda_))


def values(weight: PerModel, normalize: bool) -> FusedMerge:
    """Σ wᵢTᵢ, as `linear`."""
    divisor = summed(weight, at_least=0) if normalize else 1.0
    mixing, adding = Mixing(False, False, np.float32(divisor), np.float32(-1)), [True] * len(weight)
    return FusedMerge(_weighted(weight), np.array(adding), mixing, is_update=False)


def sparsified(
    task: TensorTask,
    weight: PerModel,
    density: PerModel,
    how: Fact,
    mixing: Mixing,
    *,
    rescale: bool = False,
    inverse: bool = False,
) -> FusedMerge:
    """Rows that are trimmed, cut to a band or dropped from, then rescaled, weighted and mixed.

    Rescaled to their L1 norm by the factor in the plan, or, if `inverse`, divided by their density.
    Raises OperatorError if a trim lacks its rule.
    """
    rows = _weighted(weight)
    for k, share in enumerate(density):
        if 0 < share < 1:
            _sparsify(rows[k], task, k, share, how)
            if rescale and inverse:
                rows[k]["divisor"] = share
            elif rescale:
                rows[k]["scale"] = task.experts[k].scale
    return FusedMerge(rows, np.array(density) > 0, mixing)


def _weighted(weight: PerModel) -> npt.NDArray[np.void]:
    rows = np.zeros(len(weight), ROW)
    rows["scale"], rows["divisor"], rows["weight"] = 1, 1, weight
    return rows


def _sparsify(row: np.void, task: TensorTask, k: int, share: float, how: Fact) -> None:
    expert, limit = task.experts[k], keep_below(share)
    if how in ("trim", "band"):
        trim = trim_rule(task, k, share)
        row["trims"], row["trim_stop_elem"] = True, trim.tie_stop_elem
        row["trim_threshold"] = _float_of(trim.threshold_bits)
        row["next_threshold"] = _float_of(trim.threshold_bits + 1)
    if how == "band" and expert.outliers is not None:
        row["drops_outliers"], row["outlier_stop_elem"] = True, expert.outliers.tie_stop_elem
        row["outlier_threshold"] = _float_of(expert.outliers.threshold_bits)
    if how == "drop" and limit < 2**32:
        row["draws"], row["keep_below"] = True, limit
        row["stream"] = stream_key(task.seed, expert.position, task.name)


def _float_of(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)
