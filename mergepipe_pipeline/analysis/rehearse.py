"""Applies an operator to samples of deltas: what planning rehearses with. No file is read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.operators.registry import Window
from mergepipe_pipeline.spec.plan import TensorTask


def apply_to_deltas(task: TensorTask, deltas: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The merged update, float32 [n], of deltas, float32 [E, n]; the base counts as zero."""
    base = torch.zeros(deltas.shape[1])
    window = Window(base, torch.from_numpy(deltas), task, 0)
    update: npt.NDArray[np.float32] = OPERATORS[task.operator].apply(window).numpy()
    return update
