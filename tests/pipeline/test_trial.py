"""The engine's trial: costs that follow the model are found again, and a real one is run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.pipeline import trial as module
from mergepipe_pipeline.pipeline.trial import FEW, MANY, MethodCost, line, pace_of, try_engine

COST = st.floats(1e-3, 10)


@settings(max_examples=50, deadline=None)
@given(COST, COST, COST, COST, COST, COST)
def test_costs_that_follow_the_model_are_found_exactly(
    plan_s: float, input_s: float, budget_s: float, facts_s: float, elem_s: float, expert_s: float
) -> None:
    elems, tensors = 1000, 8

    def cost(k: int, fresh: int) -> MethodCost:
        planned = plan_s + k * tensors * input_s
        bought = planned + k * tensors * budget_s
        merged = elems * elem_s + k * elems * expert_s
        return MethodCost(k, planned, bought, fresh * elems * facts_s, fresh, merged)

    found = pace_of([cost(FEW, FEW), cost(MANY, MANY - FEW)], elems, tensors)
    expected = (plan_s, input_s, budget_s, facts_s, elem_s, expert_s)
    assert (
        found.plan_s,
        found.plan_input_s,
        found.budget_input_s,
        found.facts_elem_s,
        found.elem_s,
        found.expert_elem_s,
    ) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_method_of_one_expert_is_told_by_its_output_alone() -> None:
    found = pace_of([MethodCost(1, 0.5, None, 0.0, 1, 2.0)], elems=100, tensors=5)
    assert (found.elem_s, found.expert_elem_s) == (0.02, 0.0)
    assert (found.plan_s, found.plan_input_s, found.budget_input_s) == (0.5, 0.0, 0.0)


@settings(max_examples=50, deadline=None)
@given(COST, COST)
def test_a_disturbed_line_has_neither_height_nor_slope_below_zero(low: float, high: float) -> None:
    height, slope = line([(2.0, low), (6.0, high)])
    assert height >= 0
    assert slope >= 0
    assert height + 6 * slope == pytest.approx(max(low, high) if height else high)


def test_a_real_trial_tells_every_method_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TENSORS": 4, "_ROWS": 8, "_COLUMNS": 512, "ELEMS": 16384}.items():
        monkeypatch.setattr(module, name, value)
    found = try_engine(tmp_path, ("linear", "slerp"))
    assert set(found.methods) == {"linear", "slerp"}
    assert found.methods["linear"].elem_s > 0
    assert found.methods["slerp"].expert_elem_s == 0
    assert 0 < found.start_s < 100
    assert 0 < found.commit_s < 100
