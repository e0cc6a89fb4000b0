"""The verb `plan`: what will be read for a recipe under its budget, stored by id.

Earlier stages of a recipe are merged on the way: a plan names the bytes it reads, so what it reads
must be there. Their results are snapshots like any other, found again by content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from mergepipe_pipeline.contents.other_codecs import read_without_packs, refuse_other_codec
from mergepipe_pipeline.contents.rests import damaged_rest_named
from mergepipe_pipeline.contents.tensor_digests import ensure_digests
from mergepipe_pipeline.domain.checkpoint import AWAY, Checkpoint
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.domain.request import RequestedModel
from mergepipe_pipeline.execution.plan_store import store_plan
from mergepipe_pipeline.execution.run_stages import run_stages
from mergepipe_pipeline.facts.gather import gather
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.requested import requested
from mergepipe_pipeline.resolution.resolve import (
    Planning,
    ResolvedRecipe,
    resolve,
    resolve_stage,
)
from mergepipe_pipeline.warehouse import Warehouse


def make_plan(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    *,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> MergePlan:
    """Resolve the recipe, gather what the planner needs, select blocks, store the plan.

    The `checkpoints` are registered already, and stay so. Raises what `resolve` raises,
    and BudgetError for a budget that the strategy cannot meet.
    """
    resolved, results = resolve_after_stages(warehouse, parsed, progress=progress, **planning)
    return plan_resolved(
        warehouse, resolved, progress, unnamed=results, checkpoints=planning.get("checkpoints")
    )


def resolve_after_stages(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    *,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> tuple[ResolvedRecipe, Mapping[str, Checkpoint]]:
    """The last stage, checked, and the results of those before it, which are merged now.

    Their warnings are among those of the last stage.
    """

    models: list[RequestedModel] = []
    packs: list[str] = []
    inexact: list[str] = []
    warnings: dict[str, None] = {}

    def plan_stage(stage: ParsedRecipe, pending: Mapping[str, Checkpoint]) -> MergePlan:
        resolved = resolve_stage(warehouse, stage, pending, **planning)
        resolved = replace(resolved, inexact=tuple(inexact))
        plan = plan_resolved(
            warehouse, resolved, progress, unnamed=pending, checkpoints=planning.get("checkpoints")
        )
        models.extend(plan.request.models)
        packs.extend(plan.request.packs)
        if resolved.recipe.budget != Budget() and plan.estimates.error_bound != 0:
            inexact.append(stage.stage or stage.name)
        warnings.update(dict.fromkeys(plan.warnings))
        return plan

    if parsed.before:
        resolve(warehouse, parsed, **planning)
    results = run_stages(warehouse, parsed, plan_stage, progress)
    resolved = resolve_stage(warehouse, parsed, results, **planning)
    request = replace(resolved.request, models=tuple(models), packs=tuple(packs))
    warnings.update(dict.fromkeys(resolved.recipe.warnings))
    if inexact:
        warnings[f"{_merged_in_part(inexact)}: an error is of the last stage alone"] = None
    recipe = replace(resolved.recipe, warnings=tuple(warnings))
    resolved = replace(resolved, request=request, recipe=recipe, inexact=tuple(inexact))
    return resolved, results


def _merged_in_part(stages: Sequence[str]) -> str:
    which = f"stage {stages[0]} was" if len(stages) == 1 else f"stages {', '.join(stages)} were"
    return f"{which} merged under the budget, too"


@damaged_rest_named()
def plan_resolved(
    warehouse: Warehouse,
    resolved: ResolvedRecipe,
    progress: Progress | None = None,
    *,
    unnamed: Mapping[str, Checkpoint] | None = None,
    checkpoints: Mapping[str, Checkpoint] | None = None,
) -> MergePlan:
    """The plan of a checked recipe, stored. Neither `unnamed` results of stages nor `checkpoints`
    are registered. Raises PackVersionError for an expert that only a pack gives which this release
    does not read.
    """
    _refuse_other_codecs(warehouse, resolved)
    inputs = gather(
        warehouse, resolved, progress, unnamed={**(checkpoints or {}), **(unnamed or {})}
    )
    digests = [
        [ensure_digests(warehouse, c, progress) for c in m.checkpoints] for m in inputs.models
    ]
    request = requested(resolved, inputs.models, digests, unnamed or {})
    plan = inputs.builder(digests).build()
    if resolved.inexact:  # their errors are in this stage's inputs
        unknown = replace(
            plan.estimates,
            error_bound=None,
            bound_note=_merged_in_part(resolved.inexact),
            predicted_error=None,
            predicted_margin=None,
        )
        plan = replace(plan, estimates=unknown)
    packs = (*request.packs, *(p.pack_id for p in plan.packs))
    plan = replace(plan, request=replace(request, packs=packs))
    store_plan(warehouse, plan)
    experts = [c for model in _experts(resolved) for c in model.checkpoints]
    (progress or Silent()).warn(*read_without_packs(warehouse, experts))
    return plan


def _refuse_other_codecs(warehouse: Warehouse, resolved: ResolvedRecipe) -> None:
    for checkpoint in (c for model in resolved.originals for c in model.checkpoints):
        if checkpoint.is_away:
            folder = Path(checkpoint.root.removeprefix(AWAY))
            record = warehouse.replaced.find(folder.name)
            if record is not None:
                refuse_other_codec(warehouse, record.pack_id)


def _experts(resolved: ResolvedRecipe) -> Iterator[Model]:
    """The models but the base; none where packs are not to be read."""
    if resolved.request.no_packs:
        return
    for number, model in enumerate(resolved.originals):
        if number != resolved.recipe.base:
            yield model
