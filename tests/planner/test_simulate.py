"""Operators on samples of deltas: compiled, in NumPy and in torch they give the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mergepipe_pipeline.domain.plan import ExpertInput, TensorTask, TrimRule
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.planner.simulate import simulation_of

N, WEIGHTS = 4096, (1.0, 0.5, -0.25)


def task_of(method: str, params: dict[str, float | bool]) -> TensorTask:
    """A task on three experts that keeps about half of each delta."""
    rule = TrimRule(int(np.float32(0.7).view(np.uint32)), N // 2)
    above = TrimRule(int(np.float32(1.9).view(np.uint32)), N // 3)
    view = TensorView("t", "F32", (N,), (), ())
    experts = tuple(
        ExpertInput(n, view, "", tuple({"weight": w, **params}.items()), (), (), rule, above)
        for n, w in enumerate(WEIGHTS)
    )
    normal = (("normalize", True), ("lambda", 1.5))
    return TensorTask("t", (64,), "F32", method, normal, 7, None, experts)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("ties", {"density": 0.5}),
        ("dare_ties", {"density": 0.5}),
        ("breadcrumbs_ties", {"density": 0.5, "gamma": 0.01}),
        ("breadcrumbs", {"density": 0.5, "gamma": 0.01}),
    ],
)
def test_compiled_samples_are_merged_as_torch_merges_them(
    monkeypatch: pytest.MonkeyPatch, method: str, params: dict[str, float | bool]
) -> None:
    deltas = np.random.default_rng(0).normal(size=(3, N)).astype(np.float32)
    deltas[1, ::7] = deltas[2, ::5] = np.float32(0.7)  # ties with the threshold
    task = task_of(method, params)
    assert OPERATORS[method].fused is not None
    compiled = simulation_of(task)(deltas.copy())
    known = OPERATORS[method]
    in_torch = replace(known, hooks=replace(known.hooks, fused=None))
    monkeypatch.setitem(OPERATORS, method, in_torch)
    np.testing.assert_array_equal(compiled, simulation_of(task)(deltas.copy()))
    assert (compiled != 0).any()
