"""A gate lets pass what keeps to each threshold, its limit included, as people count."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.evaluation import Evaluation, Gate, Metrics, Threshold
from mergepipe_pipeline.errors import EvaluationError
from mergepipe_pipeline.quality.judge import is_met, judge

DECIMALS = st.decimals(-1000, 1000, places=4, allow_nan=False)
ALLOWED = st.decimals(0, 10, places=4, allow_nan=False)
STEP = Decimal("0.0001")


def measured(metrics: Metrics, snapshot_id: str = "new") -> Evaluation:
    return Evaluation(snapshot_id, "e", "eval.py", metrics, 1.0, "now", "")


@given(DECIMALS, ALLOWED, st.booleans())
def test_a_change_of_exactly_what_is_allowed_passes_and_one_step_more_does_not(
    live: Decimal, allowed: Decimal, is_drop: bool
) -> None:
    threshold = Threshold("a", "max_drop" if is_drop else "max_rise", float(allowed))
    sign = -1 if is_drop else 1
    at, beyond = live + sign * allowed, live + sign * (allowed + STEP)
    assert is_met(threshold, float(at), float(live))
    assert not is_met(threshold, float(beyond), float(live))


@given(DECIMALS, DECIMALS)
def test_absolute_thresholds_look_at_nothing_live(value: Decimal, limit: Decimal) -> None:
    for live in (None, 0.0):
        assert is_met(Threshold("a", "min", float(limit)), float(value), live) == (value >= limit)
        assert is_met(Threshold("a", "max", float(limit)), float(value), live) == (value <= limit)


@pytest.mark.parametrize(
    ("value", "live", "passed"), [(12.24, 12.0, True), (12.25, 12.0, False), (-11.8, -12.0, True)]
)
def test_a_share_is_of_the_live_value_without_its_sign(
    value: float, live: float, passed: bool
) -> None:
    assert is_met(Threshold("p", "max_rise", 0.02, is_share=True), value, live) == passed


def test_the_sentence_says_metric_value_threshold_and_live_value() -> None:
    gate = Gate(
        (Threshold("accuracy", "max_drop", 0.01), Threshold("p", "max_rise", 0.02, is_share=True))
    )
    verdict = judge(
        gate, measured({"accuracy": 0.52, "p": 12.1}), measured({"accuracy": 0.6, "p": 12.0}, "old")
    )
    assert not verdict.passed
    told = "accuracy is 0.52, 0.6 live; the gate asks for a drop of at most 0.01"
    assert verdict.summary == told
    assert verdict.findings[1].summary == "p is 12.1, 12 live (a rise of at most 2 %)"
    assert verdict.live_snapshot_id == "old"


def test_relative_thresholds_pass_and_say_so_while_nothing_is_live() -> None:
    verdict = judge(Gate((Threshold("a", "max_drop", 0.0),)), measured({"a": -5.0}), None)
    assert verdict.passed
    assert verdict.summary == "a is -5 (a drop of at most 0 passes: nothing is live yet)"


def test_a_metric_that_an_evaluator_does_not_give_is_an_error_that_names_those_it_does() -> None:
    gate = Gate((Threshold("acuracy", "min", 0.6),))
    with pytest.raises(EvaluationError, match=r"gate\.acuracy.*one of accuracy, loss"):
        judge(gate, measured({"accuracy": 0.7, "loss": 2.0}), None)
