"""The stages of a recipe one after the other: those before the last are merged for its plan.

Their results are snapshots that nothing publishes, found again by content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Unpack

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.execution.plan_leases import lease_until_exit
from mergepipe_pipeline.execution.planning import NO_STAGES, StageResults, make_plan, plan_resolved
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.resolve import Planning, ResolvedRecipe, resolve, resolve_stage
from mergepipe_pipeline.warehouse import Warehouse

#: Checks one stage on the results of those before it.
ResolveStage = Callable[[ParsedRecipe, StageResults], ResolvedRecipe]


def plan_in_stages(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    *,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> MergePlan:
    """Merge the stages before a recipe's last and plan the last; raises as `make_plan`."""
    stages = merge_stages(warehouse, parsed, progress=progress, **planning)
    return make_plan(warehouse, parsed, stages, progress=progress, **planning)


def merge_stages(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    *,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> StageResults:
    """Merge the stages before a recipe's last, once all of it is checked; gives their results."""
    if not parsed.before:
        return NO_STAGES
    resolve(warehouse, parsed, **planning)

    def resolve_next(stage: ParsedRecipe, stages: StageResults) -> ResolvedRecipe:
        return resolve_stage(warehouse, stage, stages.checkpoints, **planning)

    registered = planning.get("checkpoints") or ()
    return run_stages(warehouse, parsed, resolve_next, progress, registered=registered)


def run_stages(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    resolve_next: ResolveStage,
    progress: Progress | None,
    *,
    registered: Collection[str] = (),
) -> StageResults:
    """Plan and merge the stages before a recipe's last; `registered` as in `plan_resolved`."""
    stages = NO_STAGES
    for stage in parsed.before:
        resolved = resolve_next(stage, stages)
        plan = plan_resolved(warehouse, resolved, stages, progress, registered=registered)
        lease_until_exit(warehouse, plan)
        snapshot = run_plan(warehouse, plan, progress=progress, is_stage=True).snapshot
        name = stage.stage or stage.name
        stages = stages.after(name, resolved, plan, open_checkpoint(snapshot.path, name))
    return stages
