"""Operators on samples of deltas: what planning simulates with. No file is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.domain.plan import TensorTask
from mergepipe_pipeline.operators import OPERATORS, Operator, Window
from mergepipe_pipeline.operators.steps.fused_kernel import FusedKernel

Samples = F32Array


def simulation_of(task: TensorTask) -> Callable[[Samples], Samples]:
    """From deltas, float32 [E, n], to the merged update, float32 [n]; the base counts as zero.

    The deltas may be overwritten.
    """
    operator = OPERATORS[task.operator]
    if operator.fused is None:
        return lambda deltas: _in_torch(operator, task, deltas)
    count = len(task.experts)
    kernel = FusedKernel(operator.fused(task), (True,) * count)

    def simulate(deltas: Samples) -> Samples:
        n = deltas.shape[1]
        update = np.empty(n, np.float32)
        kernel.run(np.zeros(n, np.float32), deltas, np.arange(count), 0, update)
        return update

    return simulate


def _in_torch(operator: Operator, task: TensorTask, deltas: Samples) -> Samples:
    import torch

    window = Window(torch.zeros(deltas.shape[1]), torch.from_numpy(deltas), task, 0)
    update: Samples = operator.apply(window).numpy()
    return update
