"""Whether a snapshot passes a gate: its metrics against thresholds, and against what is live."""

from __future__ import annotations

from decimal import Decimal

from mergepipe_pipeline.domain.evaluation import (
    RELATIVE,
    Evaluation,
    Finding,
    Gate,
    Threshold,
    Verdict,
)
from mergepipe_pipeline.errors import MetricsError


def judge(gate: Gate, candidate: Evaluation, live: Evaluation | None) -> Verdict:
    """The gate's verdict on a snapshot; without a live one, relative thresholds are met.

    Absolute ones tell the live value, too, where it is known.

    Raises MetricsError for a metric that an evaluation does not give.
    """
    findings = tuple(_finding(t, candidate, live) for t in gate.thresholds)
    return Verdict(candidate.snapshot_id, None if live is None else live.snapshot_id, findings)


def _finding(threshold: Threshold, candidate: Evaluation, live: Evaluation | None) -> Finding:
    value, before = _metric(threshold.metric, candidate), None
    if live is not None and threshold.comparison in RELATIVE:
        before = _metric(threshold.metric, live)
    elif live is not None:
        before = live.metrics.get(threshold.metric)
    return Finding(threshold, value, before, is_met(threshold, value, before))


def _metric(name: str, evaluation: Evaluation) -> float:
    if name not in evaluation.metrics:
        raise MetricsError(
            "A gate asks for a metric that its evaluator does not give",
            where=f"gate.{name}, snapshot {evaluation.snapshot_id}",
            expected=f"one of {', '.join(evaluation.metrics)}",
            found=name,
            next_step="correct `gate:` in the recipe, or let the evaluator print the metric",
        )
    return evaluation.metrics[name]


def is_met(threshold: Threshold, value: float, live: float | None) -> bool:
    """Whether a value keeps to a threshold, its limit included.

    Numbers count as they are written: 0.6 is a drop of 0.01 from 0.61, though not in binary.
    """
    measured, allowed = _exact(value), _exact(threshold.value)
    if threshold.comparison == "min":
        return measured >= allowed
    if threshold.comparison == "max":
        return measured <= allowed
    if live is None:
        return True
    before = _exact(live)
    if threshold.is_share:
        allowed *= abs(before)
    change = measured - before
    return -change <= allowed if threshold.comparison == "max_drop" else change <= allowed


def _exact(number: float) -> Decimal:
    return Decimal(repr(number))
