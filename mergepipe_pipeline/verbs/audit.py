"""The verb `audit` of a standing pipeline: is what was planned and merged fit for readers?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.execution.lookup import load_plan
from mergepipe_pipeline.integrity.weights import (
    MEND,
    MOST_NAMED,
    Audit,
    audit_snapshot,
    is_over_budget,
    non_finite_inputs,
)
from mergepipe_pipeline.text import listed
from mergepipe_pipeline.verbs.deploy import current_snapshot
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class AuditReport:
    """A snapshot whose every byte has its digest; `summary` says whether its weights are finite.

    `non_finite` counts NaN and infinite elements by tensor.
    """

    files: int
    nbytes: int
    non_finite: Mapping[str, int]
    summary: str


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """Whether a plan keeps to its budget, and in words how the two compare."""

    is_kept: bool
    summary: str


def audit_recipe(warehouse: Warehouse, recipe: str) -> AuditReport:
    """Read every byte of the recipe's current snapshot, whoever audited it before.

    Raises CorruptionError with the file and tensor that is wrong, NotFoundError.
    """
    snapshot = current_snapshot(warehouse, recipe)
    audit = audit_snapshot(warehouse, recipe, snapshot, anew=True)
    return AuditReport(
        files=audit.files,
        nbytes=audit.nbytes,
        non_finite=audit.non_finite,
        summary=_finite_sentence(warehouse, audit, snapshot),
    )


def _finite_sentence(warehouse: Warehouse, audit: Audit, snapshot: Snapshot) -> str:
    """Which tensors of a snapshot hold NaN or infinity, in which files, and which inputs gave it.

    Else that none does.
    """
    if not audit.non_finite:
        return "Every weight is finite."
    entries = open_checkpoint(snapshot.path, snapshot.snapshot_id[:12]).by_name
    files = sorted({entries[name].file for name in audit.non_finite})
    return (
        f"NaN or infinity: {audit.summary}; file {listed(files, MOST_NAMED, 'files more')} of "
        f"{snapshot.path}{_inputs_phrase(warehouse, audit, snapshot)}. Next: {MEND}"
    )


def _inputs_phrase(warehouse: Warehouse, audit: Audit, snapshot: Snapshot) -> str:
    try:
        plan = load_plan(warehouse, snapshot.manifest.plan_id)
    except (NotFoundError, CorruptionError):
        return ""
    held = non_finite_inputs(plan, list(audit.non_finite)[:MOST_NAMED])
    return f"; such values are in {' and '.join(held)}" if held else ""


def audit_budget(plan: MergePlan) -> BudgetReport:
    """Compare the expert bytes that a plan reads with its budget; says where most of them are."""
    e = plan.estimates
    if not is_over_budget(plan) or e.budget_bytes is None:
        sentence = f"{e.expert_bytes_planned} bytes of experts are read: the budget allows them."
        return BudgetReport(is_kept=True, summary=sentence)
    inputs = ((t.name, e) for layer in plan.layers for t in layer.tasks for e in t.experts)
    tensor, most = max(inputs, key=lambda pair: pair[1].read_nbytes)
    view = most.view
    (part, *_) = (*view.stored, *(view.low_rank.parts if view.low_rank else ()))
    source = plan.sources[part.source]
    sentence = (
        f"{e.expert_bytes_planned} bytes of experts would be read, "
        f"{e.expert_bytes_planned - e.budget_bytes} more than the budget of {e.budget_bytes}; "
        f"most, {most.read_nbytes}, from expert {source.name}, file {part.entry.file} of "
        f"{source.root}, tensor {tensor}. "
        f"Plan {plan.plan_id}. Next: materialize the plan again"
    )
    return BudgetReport(is_kept=False, summary=sentence)
