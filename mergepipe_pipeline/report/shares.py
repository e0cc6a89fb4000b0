"""What a plan reads of which expert, and what makes each tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mergepipe_pipeline.execution.lookup import plan_of
from mergepipe_pipeline.spec.blocks import total_elems
from mergepipe_pipeline.spec.plan import ExpertInput, MergePlan
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Share:
    """What a plan reads of one expert in one place (a layer, a tensor, or all of it), in bytes."""

    expert: str
    place: str
    nbytes_total: int
    nbytes_read: int
    nbytes_known_zero: int


@dataclass(frozen=True, slots=True)
class OperatorChoice:
    """What makes one output tensor; `variant` "" for none, `reason` "" where the recipe says it."""

    tensor: str
    layer: str
    operator: str
    variant: str
    reason: str


def shares(plan: MergePlan, by: str) -> Iterable[Share]:
    """The shares of a plan in plan order."""
    sums: dict[tuple[str, str], list[int]] = {}
    for layer in plan.layers:
        for task in layer.tasks:
            place = {"expert": "", "layer": layer.name, "tensor": task.name}[by]
            for e in task.experts:
                size = e.view.stored_nbytes // max(1, e.view.numel)
                row = sums.setdefault((_name(plan, e), place), [0, 0, 0])
                row[0] += e.view.nbytes
                row[1] += e.read_nbytes
                row[2] += (total_elems(e.covered) - total_elems(e.read)) * size
    return [Share(expert, place, *counts) for (expert, place), counts in sums.items()]


def operator_choices(plan: MergePlan) -> tuple[OperatorChoice, ...]:
    """What makes each output tensor, in plan order; `copy` takes it as it is."""
    return tuple(
        OperatorChoice(task.name, layer.name, task.operator, task.variant, task.reason)
        for layer in plan.layers
        for task in layer.tasks
    )


def _name(plan: MergePlan, e: ExpertInput) -> str:
    """The names of the checkpoints that an input is read from, joined by `+`."""
    parts = list(e.view.stored)
    if e.view.low_rank:
        parts.append(e.view.low_rank.a)
    names = dict.fromkeys(plan.sources[p.source].name for p in parts)
    return "+".join(names) or "unchanged"


def explain(
    warehouse: Warehouse, what: str, by: str = "expert"
) -> tuple[MergePlan, tuple[Share, ...]]:
    """Which bytes of which expert a plan reads: `by` expert, layer or tensor.

    Raises NotFoundError for an unknown plan, snapshot or ref.
    """
    plan = plan_of(warehouse, what)
    return plan, tuple(shares(plan, by))
