"""The verb `plan`: what will be read for a recipe under its budget, stored by id."""

from __future__ import annotations

import json
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.digest import canonical_json
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.pipeline.analyze import ensure_digests, ensure_stats
from mergepipe_pipeline.pipeline.check import Checked, check
from mergepipe_pipeline.pipeline.facts import ensure_facts
from mergepipe_pipeline.pipeline.progress import Progress
from mergepipe_pipeline.planner.build import PlanInput, build_plan
from mergepipe_pipeline.recipe.load import RawRecipe
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.warehouse import Warehouse


def make_plan(
    home: Warehouse,
    raw: RawRecipe,
    *,
    relative_to: Path | None = None,
    budget: str | None = None,
    strategy: str | None = None,
    block_elems: int | None = None,
    progress: Progress | None = None,
) -> MergePlan:
    """Check the recipe, learn what the catalog lacks, buy blocks, store the plan.

    Raises what `check` raises, and BudgetError for a budget that the strategy cannot meet.
    """
    checked = check(
        home,
        raw,
        relative_to=relative_to,
        budget=budget,
        strategy=strategy,
        block_elems=block_elems,
    )
    plan = plan_checked(home, checked, progress)
    write_atomic(home.plan_path(plan.plan_id), canonical_json(plan.to_json()))
    return plan


def plan_checked(home: Warehouse, checked: Checked, progress: Progress | None = None) -> MergePlan:
    """The plan of a checked recipe."""
    recipe, base, experts = checked.recipe, checked.base, checked.experts
    operator = OPERATORS[recipe.method]
    catalog = Catalog(home.catalog)
    known = set(catalog.names())
    for checkpoint in (base, *experts) if base else experts:
        # A name's own base stays: several recipes may pair one expert with several bases.
        new_expert = base and checkpoint is not base and checkpoint.name not in known
        catalog.register(checkpoint, base.name if base and new_expert else None)
    stats = []
    if base is not None:
        stats = [ensure_stats(home, e, base, checked.grid, progress) for e in experts]
    facts = ensure_facts(home, recipe, operator.schema, base, experts, stats, progress)
    inputs = [
        PlanInput(e, ensure_digests(home, e, progress), stats[i] if stats else None)
        for i, e in enumerate(experts)
    ]
    base_input = PlanInput(base, ensure_digests(home, base, progress)) if base else None
    return build_plan(
        recipe, operator.schema, operator.coefficients, base_input, inputs, facts, checked.grid
    )


def load_plan(home: Warehouse, plan_id: str) -> MergePlan:
    """A stored plan by its id. Raises NotFoundError."""
    path = home.plan_path(plan_id)
    if not path.exists():
        raise NotFoundError(
            "No such plan",
            where=str(path),
            found=plan_id,
            next_step="make it with `mergepipe plan RECIPE`",
        )
    return MergePlan.from_json(json.loads(path.read_bytes()))
