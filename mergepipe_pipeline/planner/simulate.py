"""Operators on samples of deltas: what planning simulates with. No file is read.

NumPy does the steps of a `FusedMerge` that draws no random numbers, and gives the same numbers: the
compiled loops take longer to load than all samples of a merge to be merged.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import BoolArray, F32Array
from mergepipe_pipeline.domain.plan import TensorTask
from mergepipe_pipeline.operators import OPERATORS, Operator, Window
from mergepipe_pipeline.operators.steps.fused import FusedMerge

Samples = F32Array


def simulation_of(task: TensorTask) -> Callable[[Samples], Samples]:
    """From deltas, float32 [E, n], to the merged update, float32 [n]; the base counts as zero.

    The deltas may be overwritten.
    """
    operator = OPERATORS[task.operator]
    if operator.fused is None:
        return lambda deltas: _in_torch(operator, task, deltas)
    fused, count = operator.fused(task), len(task.experts)
    if fused.is_update and not fused.rows["draws"].any():
        return lambda deltas: _in_numpy(fused, deltas[fused.adding])

    from mergepipe_pipeline.operators.steps.fused_kernel import FusedKernel

    kernel = FusedKernel(fused, (True,) * count)

    def simulate(deltas: Samples) -> Samples:
        n = deltas.shape[1]
        update = np.empty(n, np.float32)
        kernel.run(np.zeros(n, np.float32), deltas, np.arange(count), 0, update)
        return update

    return simulate


def _in_numpy(fused: FusedMerge, deltas: Samples) -> Samples:
    """Merge `deltas` [rows that add, n], which are overwritten."""
    rows, mixing = fused.rows[fused.adding, None], fused.mixing
    with np.errstate(all="ignore"):  # as compiled loops are
        if rows["trims"].any():
            deltas *= _kept(deltas, rows, "trim") | ~rows["trims"]
        if rows["drops_outliers"].any():
            deltas *= ~(_kept(deltas, rows, "outlier") & rows["drops_outliers"])
        deltas *= rows["scale"]
        deltas /= rows["divisor"]
        weight = rows["weight"]
        deltas *= weight
        total: Samples = deltas.sum(axis=0)
        if mixing.votes:
            sign = np.where(total >= 0, np.float32(1), np.float32(-1))
            deltas *= sign  # what agrees is positive
            total = np.maximum(deltas, 0).sum(axis=0)
            if mixing.normalize:
                share = (weight * (deltas > 0)).sum(axis=0)
                total /= np.where(share != 0, share, 1)
            total *= sign
        else:
            total /= mixing.divisor
        return total * -mixing.minus_lambda


def _kept(deltas: Samples, rows: npt.NDArray[np.void], rule: str) -> BoolArray:
    """What is above a rule's threshold, or a tie before its stop."""
    size, threshold, stop = np.abs(deltas), rows[f"{rule}_threshold"], rows[f"{rule}_stop_elem"]
    kept: BoolArray = (size > threshold) | (size == threshold) & (np.arange(size.shape[1]) < stop)
    return kept


def _in_torch(operator: Operator, task: TensorTask, deltas: Samples) -> Samples:
    import torch

    window = Window(torch.zeros(deltas.shape[1]), torch.from_numpy(deltas), task, 0)
    update: Samples = operator.apply(window).numpy()
    return update
