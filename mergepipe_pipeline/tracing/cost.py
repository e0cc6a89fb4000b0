"""What a bisection costs at most, known before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.execution.lookup import load_plan
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.text import size
from mergepipe_pipeline.timing.forecast import forecast_plan
from mergepipe_pipeline.tracing.regression import Regression
from mergepipe_pipeline.tracing.search import most_questions
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Cost:
    """At most so many candidates are evaluated, `merges` of them merged, which runs `layers`.

    `nbytes` are read for it, of experts and base. `seconds` is None where nobody has measured this
    machine (`reason`); `evaluation_s` is what the last evaluation took. What is cached or was
    evaluated before costs nothing.
    """

    candidates: int
    merges: int
    layers: int
    nbytes: int
    evaluation_s: float
    seconds: float | None
    reason: str = ""

    @property
    def summary(self) -> str:
        """The worst case in one sentence."""
        time = f"not predicted: {self.reason}" if self.seconds is None else f"{self.seconds:.0f} s"
        return (
            f"{self.candidates} candidates, {self.merges} of them merged: {self.layers} layers and "
            f"{size(self.nbytes)} to read; an evaluation takes {self.evaluation_s:.1f} s "
            f"(time: {time})"
        )


def cost_of(
    warehouse: Warehouse, regression: Regression, most: int, evaluation_s: float, *, layers: bool
) -> Cost:
    """The worst case of tracing a regression with at most `most` candidates; reads no weight.

    With `layers` the guilty expert's layers are searched, too.
    """
    plan = load_plan(warehouse, regression.refused.manifest.plan_id)
    plans = [plan, *_stages(warehouse, plan)]
    suspects = regression.suspects
    # Undoing all of them is the live snapshot, or one merge more.
    first = 0 if regression.is_live(suspects) else 1
    of_experts = min(most, first + most_questions(len(suspects))) if suspects else 0
    of_layers = min(most - of_experts, most_questions(len(plan.layers))) if suspects else 0
    candidates, seconds = of_experts + (of_layers if layers else 0), None
    predicted = [forecast_plan(warehouse, p) for p in plans]
    merge_s = [p.seconds.total_s for p in predicted if p.seconds is not None]
    if len(merge_s) == len(plans):
        seconds = of_experts * sum(merge_s) + candidates * evaluation_s
    return Cost(
        candidates,
        of_experts,
        of_experts * sum(len(p.layers) for p in plans),
        of_experts * sum(p.read_nbytes for p in plans),
        evaluation_s,
        seconds,
        next((p.reason for p in predicted if p.reason), ""),
    )


def _stages(warehouse: Warehouse, plan: MergePlan) -> Iterator[MergePlan]:
    """The plans of the stages whose results a plan merges, and of the stages before those."""
    input_roots = {model.root for model in plan.request.models}
    for source in plan.sources:
        folder = Path(source.root)
        if source.root not in input_roots and folder.parent == warehouse.snapshots:
            snapshot = load_snapshot(warehouse.snapshots, folder.name)
            stage = load_plan(warehouse, snapshot.manifest.plan_id)
            yield stage
            yield from _stages(warehouse, stage)
