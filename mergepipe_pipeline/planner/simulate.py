"""Operators on samples of deltas: what planning simulates with. No file is read.

NumPy does the steps of a `FusedMerge` that draws no random numbers, and gives the same numbers: the
compiled loops take longer to load than all samples of a merge to be merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, F32Array
from mergepipe_pipeline.domain.plan import TensorTask, TrimRule
from mergepipe_pipeline.operators import OPERATORS, Operator, Window
from mergepipe_pipeline.operators.steps.fused import FusedMerge, FusedRow

Samples = F32Array
#: Rules that keep every number, and none.
_ALL, _NONE = TrimRule(0, 1 << 62), TrimRule(0x7F800000, 0)


def simulation_of(task: TensorTask) -> Callable[[Samples], Samples]:
    """From deltas, float32 [E, n], to the merged update, float32 [n]; the base counts as zero.

    The deltas may be overwritten.
    """
    operator = OPERATORS[task.operator]
    if operator.fused is None:
        return lambda deltas: _in_torch(operator, task, deltas)
    fused, count = operator.fused(task), len(task.experts)
    used = {k: row for k, row in enumerate(fused.rows) if row is not None}
    if fused.mix != "values" and all(row.stream is None for row in used.values()):
        return lambda deltas: _in_numpy(fused, list(used.values()), deltas[list(used)])

    from mergepipe_pipeline.operators.steps.fused_kernel import FusedKernel

    kernel = FusedKernel(fused, (True,) * count)

    def simulate(deltas: Samples) -> Samples:
        n = deltas.shape[1]
        update = np.empty(n, np.float32)
        kernel.run(np.zeros(n, np.float32), deltas, np.arange(count), 0, update)
        return update

    return simulate


def _in_numpy(fused: FusedMerge, rows: Sequence[FusedRow], deltas: Samples) -> Samples:
    """Merge `deltas` [rows, n], which are overwritten."""

    def column(name: str) -> F32Array:
        return np.array([[getattr(row, name)] for row in rows], np.float32)

    with np.errstate(all="ignore"):  # as compiled loops are
        if any(row.trim for row in rows):
            deltas *= _kept(deltas, [row.trim or _ALL for row in rows])
        if any(row.outliers for row in rows):
            deltas *= ~_kept(deltas, [row.outliers or _NONE for row in rows])
        deltas *= column("scale")
        deltas /= column("divisor")
        weight = column("weight")
        deltas *= weight
        total: Samples = deltas.sum(axis=0)
        if fused.mix == "vote":
            sign = np.where(total >= 0, np.float32(1), np.float32(-1))
            deltas *= sign  # what agrees is positive
            total = np.maximum(deltas, 0).sum(axis=0)
            if fused.normalize:
                share = (weight * (deltas > 0)).sum(axis=0)
                total /= np.where(share != 0, share, 1)
            total *= sign
        else:
            total /= np.float32(fused.divisor)
        return total * np.float32(fused.lambda_)


def _kept(deltas: Samples, rules: Sequence[TrimRule]) -> BoolArray:
    size = np.abs(deltas)
    threshold = np.array([[r.threshold_bits] for r in rules], np.uint32).view(np.float32)
    stop = np.array([[r.tie_stop_elem] for r in rules])
    kept: BoolArray = (size > threshold) | (size == threshold) & (np.arange(size.shape[1]) < stop)
    return kept


def _in_torch(operator: Operator, task: TensorTask, deltas: Samples) -> Samples:
    import torch

    window = Window(torch.zeros(deltas.shape[1]), torch.from_numpy(deltas), task, 0)
    update: Samples = operator.apply(window).numpy()
    return update
