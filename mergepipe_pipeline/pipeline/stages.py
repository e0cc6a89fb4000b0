"""Runs the stages before a recipe's last: each becomes a snapshot that nothing publishes.

Layers and snapshots are found again by content, so a stage that was run before costs a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mergepipe_pipeline.pipeline.merge import merge
from mergepipe_pipeline.pipeline.progress import Progress
from mergepipe_pipeline.recipe.load import RawRecipe
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.storage.checkpoint import open_checkpoint
from mergepipe_pipeline.warehouse import Warehouse

Planner = Callable[
    [Warehouse, RawRecipe, Mapping[str, Checkpoint], Path | None, Progress | None], MergePlan
]


def run_stages(
    home: Warehouse,
    raw: RawRecipe,
    relative_to: Path | None,
    progress: Progress | None,
    plan_stage: Planner,
) -> dict[str, Checkpoint]:
    """Stage name to the checkpoint of its result, for all stages before the last."""
    results: dict[str, Checkpoint] = {}
    for stage in raw.before:
        name = stage.stage or stage.name
        plan = plan_stage(home, stage, results, relative_to, progress)
        snapshot = merge(home, plan, progress=progress).snapshot
        results[name] = open_checkpoint(snapshot.path, name)
    return results
