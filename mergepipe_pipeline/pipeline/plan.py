"""The verb `plan`: what will be read for a recipe under its budget, stored by id.

Earlier stages of a recipe are merged on the way: a plan names the bytes it reads, so what it reads
must be there. Their results are snapshots like any other, found again by content.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, Unpack

from mergepipe_pipeline.digest import canonical_json, seal_line, unseal_line
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.pipeline.check import Checked, Planning, check, check_stage
from mergepipe_pipeline.pipeline.digests import ensure_digests
from mergepipe_pipeline.pipeline.learn import learn
from mergepipe_pipeline.pipeline.progress import Progress
from mergepipe_pipeline.pipeline.request import requested
from mergepipe_pipeline.pipeline.stages import run_stages
from mergepipe_pipeline.recipe.load import RawRecipe
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.spec.request import RequestedModel
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.warehouse import Warehouse

_LOG = logging.getLogger("mergepipe")
T = TypeVar("T")


def make_plan(
    home: Warehouse,
    raw: RawRecipe,
    *,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> MergePlan:
    """Check the recipe, learn what the catalog lacks, buy blocks, store the plan.

    Checkpoints that are `known` are registered already, and stay so. Raises what `check` raises,
    and BudgetError for a budget that the strategy cannot meet.
    """
    checked, results = ready(home, raw, progress=progress, **planning)
    return plan_checked(home, checked, progress, unnamed=results, known=planning.get("known"))


def ready(
    home: Warehouse,
    raw: RawRecipe,
    *,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> tuple[Checked, Mapping[str, Checkpoint]]:
    """The last stage, checked, and the results of those before it, which are merged now."""

    models: list[RequestedModel] = []

    def plan_stage(stage: RawRecipe, pending: Mapping[str, Checkpoint]) -> MergePlan:
        checked = check_stage(home, stage, pending, **planning)
        plan = plan_checked(home, checked, progress, unnamed=pending, known=planning.get("known"))
        models.extend(plan.request.models)
        return plan

    if raw.before:
        check(home, raw, **planning)
    results = run_stages(home, raw, plan_stage, progress)
    checked = check_stage(home, raw, results, **planning)
    return replace(checked, request=replace(checked.request, models=tuple(models))), results


def plan_checked(
    home: Warehouse,
    checked: Checked,
    progress: Progress | None = None,
    *,
    unnamed: Mapping[str, Checkpoint] | None = None,
    known: Mapping[str, Checkpoint] | None = None,
) -> MergePlan:
    """The plan of a checked recipe, stored. Stages' results in `unnamed` are not registered, nor
    what is `known`.
    """
    learned = learn(home, checked, progress, unnamed={**(known or {}), **(unnamed or {})})
    digests = [[ensure_digests(home, c, progress) for c in m.checkpoints] for m in learned.models]
    request = requested(checked, learned.models, digests, unnamed or {})
    plan = replace(learned.builder(digests).build(), request=request)
    store_plan(home, plan)
    return plan


def store_plan(home: Warehouse, plan: MergePlan) -> None:
    """Write a plan, sealed, under its id. Raises StorageFullError."""
    write_atomic(home.plan_path(plan.plan_id), seal_line(canonical_json(plan.to_json())))


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
    return _read(path, checked_plan)


def stored_plans(home: Warehouse, read: Callable[[str, Any], T]) -> Iterator[tuple[str, T]]:
    """What `read` makes of each plan's id and JSON value, by id.

    Damaged plans, and those of other versions of this program, are said and left out.
    """
    for path in sorted(home.plans.glob("*.json")):
        try:
            yield path.stem, _read(path, read)
        except CorruptionError as error:
            _LOG.warning("%s", error)


def checked_plan(plan_id: str, value: Any) -> MergePlan:
    """The plan of a JSON value. Raises ValueError if it has another id."""
    plan = MergePlan.from_json(value)
    if plan.plan_id != plan_id:
        raise ValueError(f"the plan {plan.plan_id} under the name of {plan_id}")
    return plan


def _read(path: Path, read: Callable[[str, Any], T]) -> T:
    """What `read` makes of a stored plan's id and JSON value. Raises CorruptionError."""
    try:
        return read(path.stem, json.loads(unseal_line(path.read_bytes(), str(path))))
    except (CorruptionError, AttributeError, TypeError, LookupError, ValueError) as error:
        found = error.what if isinstance(error, CorruptionError) else str(error)
        raise CorruptionError(
            "A plan is damaged, or has another form than this version writes",
            where=str(path),
            expected="what `mergepipe plan` stored under this name",
            found=found,
            next_step="make it again with `mergepipe plan RECIPE`",
        ) from error
