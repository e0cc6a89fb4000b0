"""Applies an operator to samples of deltas: what planning rehearses with. No file is read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.operators.fused_kernel import FusedKernel
from mergepipe_pipeline.operators.registry import Operator, Window
from mergepipe_pipeline.spec.plan import TensorTask

Samples = npt.NDArray[np.float32]


def apply_to_deltas(task: TensorTask, deltas: Samples) -> Samples:
    """The merged update, float32 [n], of deltas, float32 [E, n]; the base counts as zero.

    `deltas` may be overwritten.
    """
    operator = OPERATORS[task.operator]
    if operator.fused is None:
        return _in_torch(operator, task, deltas)
    count, n = deltas.shape
    update = np.empty(n, np.float32)
    kernel = FusedKernel(operator.fused(task), (True,) * count)
    kernel.run(np.zeros(n, np.float32), deltas, np.arange(count), 0, update)
    return update


def _in_torch(operator: Operator, task: TensorTask, deltas: Samples) -> Samples:
    import torch

    window = Window(torch.zeros(deltas.shape[1]), torch.from_numpy(deltas), task, 0)
    update: Samples = operator.apply(window).numpy()
    return update
