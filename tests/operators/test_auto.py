"""`auto` names the operator that fits how the deltas conflict, and says why."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mergepipe_pipeline.domain.operator import Choosing
from mergepipe_pipeline.domain.plan import ExpertInput, TensorTask
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators import OPERATORS, Window

AUTO = OPERATORS["auto"]
N = 4096


def _task(n_experts: int, params: Params = ()) -> TensorTask:
    view = TensorView("w", "F32", (N,))
    inputs = tuple(
        ExpertInput(i, view, "", (("weight", 1.0),), ((0, N),), ((0, N),)) for i in range(n_experts)
    )
    return TensorTask("w", (N,), "F32", "auto", params, 0, None, inputs)


def _choose(deltas: list[np.ndarray], **params: float) -> Choosing:
    given: Params = tuple(params.items())
    base = torch.from_numpy(np.random.default_rng(0).standard_normal(N).astype(np.float32))
    rows = torch.from_numpy(np.stack(deltas).astype(np.float32))
    (step,) = AUTO.measures
    window = Window(base, rows, _task(len(deltas), given), 0)
    numbers = tuple(step.of(window).tolist())  # type: ignore[union-attr]
    assert AUTO.choose is not None
    return AUTO.choose(given, [(("weight", 1.0),)] * len(deltas), numbers)


def _noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(N) * 0.01


def test_deltas_that_are_zero_keep_the_base() -> None:
    choice = _choose([np.zeros(N), np.zeros(N)])
    assert (choice.operator, choice.reason) == ("copy", "KEEP: the deltas are 0 of the base")


def test_deltas_that_agree_are_averaged() -> None:
    common = _noise(1)
    choice = _choose([common + 0.1 * _noise(2), common + 0.1 * _noise(3)])
    assert choice.operator == "task_arithmetic"
    assert choice.reason.startswith("AVG: mean cosine +0.99")


def test_deltas_that_oppose_each_other_get_a_sign_vote() -> None:
    common = _noise(1)
    choice = _choose([common + _noise(2), _noise(3) - common])
    assert choice.operator == "ties"
    assert dict(choice.model_params[0])["density"] == 0.5
    assert choice.reason.startswith("TIES: mean cosine -0.5")


def test_deltas_at_right_angles_are_sparsified_at_random() -> None:
    choice = _choose([_noise(i) for i in range(5)])
    assert choice.operator == "dare_linear"
    assert "50 % of signs agree" in choice.reason


def test_the_limits_are_parameters() -> None:
    deltas = [_noise(i) for i in range(2)]
    assert _choose(deltas, agree_above=-1.0).operator == "task_arithmetic"
    assert _choose(deltas, oppose_below=1.0).operator == "ties"
    assert _choose(deltas, keep_below=1.0).operator == "copy"


def test_one_expert_is_added_as_it_is() -> None:
    assert _choose([_noise(1)]).operator == "task_arithmetic"


def test_auto_refuses_to_merge_itself() -> None:
    window = Window(torch.zeros(N), torch.zeros(1, N), _task(1), 0)
    with pytest.raises(OperatorError, match="auto chooses an operator and is none itself"):
        AUTO.apply(window)
