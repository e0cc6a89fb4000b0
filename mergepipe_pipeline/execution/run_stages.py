"""Runs the stages before a recipe's last: each becomes a snapshot that nothing publishes.

Layers and snapshots are found again by content, so a stage that was run before costs a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.execution.plan_leases import lease_until_exit
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.warehouse import Warehouse

#: The plan of one stage over the results of those before it, by name.
Planner = Callable[[ParsedRecipe, Mapping[str, Checkpoint]], MergePlan]


def run_stages(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    plan_stage: Planner,
    progress: Progress | None,
) -> dict[str, Checkpoint]:
    """Stage name to the checkpoint of its result, for all stages before the last."""
    results: dict[str, Checkpoint] = {}
    for stage in parsed.before:
        name = stage.stage or stage.name
        plan = plan_stage(stage, results)
        lease_until_exit(warehouse, plan)
        snapshot = run_plan(warehouse, plan, progress=progress, is_stage=True).snapshot
        results[name] = open_checkpoint(snapshot.path, name)
    return results
