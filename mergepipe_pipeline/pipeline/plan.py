"""The verb `plan`: what will be read for a recipe under its budget, stored by id.

Earlier stages of a recipe are merged on the way: a plan names the bytes it reads, so what it reads
must be there. Their results are snapshots like any other, found again by content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Unpack

from mergepipe_pipeline.digest import canonical_json
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.pipeline.check import Checked, Planning, check, check_stage
from mergepipe_pipeline.pipeline.digests import ensure_digests
from mergepipe_pipeline.pipeline.learn import learn
from mergepipe_pipeline.pipeline.progress import Progress
from mergepipe_pipeline.pipeline.stages import run_stages
from mergepipe_pipeline.recipe.load import RawRecipe
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.warehouse import Warehouse


def make_plan(
    home: Warehouse,
    raw: RawRecipe,
    *,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> MergePlan:
    """Check the recipe, learn what the catalog lacks, buy blocks, store the plan.

    Raises what `check` raises, and BudgetError for a budget that the strategy cannot meet.
    """
    checked, results = ready(home, raw, progress=progress, **planning)
    return plan_checked(home, checked, progress, unnamed=results)


def ready(
    home: Warehouse,
    raw: RawRecipe,
    *,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> tuple[Checked, Mapping[str, Checkpoint]]:
    """The last stage, checked, and the results of those before it, which are merged now."""

    def plan_stage(stage: RawRecipe, pending: Mapping[str, Checkpoint]) -> MergePlan:
        checked = check_stage(home, stage, pending, **planning)
        return plan_checked(home, checked, progress, unnamed=pending)

    if raw.before:
        check(home, raw, **planning)
    results = run_stages(home, raw, plan_stage, progress)
    return check_stage(home, raw, results, **planning), results


def plan_checked(
    home: Warehouse,
    checked: Checked,
    progress: Progress | None = None,
    *,
    unnamed: Mapping[str, Checkpoint] | None = None,
) -> MergePlan:
    """The plan of a checked recipe, stored. Checkpoints in `unnamed` are not registered."""
    learned = learn(home, checked, progress, unnamed=unnamed)
    digests = [[ensure_digests(home, c, progress) for c in m.checkpoints] for m in learned.models]
    plan = learned.builder(digests).build()
    write_atomic(home.plan_path(plan.plan_id), canonical_json(plan.to_json()))
    return plan


def load_plan(home: Warehouse, plan_id: str) -> MergePlan:
    """A stored plan by its id. Raises NotFoundError, CorruptionError."""
    path = home.plan_path(plan_id)
    if not path.exists():
        raise NotFoundError(
            "No such plan",
            where=str(path),
            found=plan_id,
            next_step="make it with `mergepipe plan RECIPE`",
        )
    try:
        return MergePlan.from_json(json.loads(path.read_bytes()))
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptionError(
            "A plan has another form than this version writes",
            where=str(path),
            found=str(error),
            next_step="remove it and make it again with `mergepipe plan RECIPE`",
        ) from error
