"""Which definitions exist: the one place, built from the recipes of the warehouse.

Loaded by `workspace.yaml`. Loading reads recipe files and the catalog, never a weight, and does not
import torch.
"""

import os

import dagster as dg

from assets.experts import expert_index
from assets.recipes import build_problem, build_recipe_assets
from mergepipe_pipeline.pipeline.cards import RecipeCard, recipe_cards
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.warehouse import Warehouse
from sensors.inbox import inbox_sensor, index_job
from sensors.recipes import (
    AssetJob,
    build_nightly,
    build_recipe_sensor,
    build_reload_sensor,
    job_name,
    recipes_token,
)


def build_definitions(home: Warehouse, *, inbox_quiet_s: float = 10.0) -> dg.Definitions:
    """The definitions of one warehouse.

    A recipe that cannot be used is one asset that says why, and has no job.
    """
    cards = recipe_cards(home)
    usable = [c for c in cards if c.problem is None]
    jobs = [build_job(c) for c in usable]
    nightly = [build_nightly(c, j) for c, j in zip(usable, jobs, strict=True)]
    built = [d for c in usable for d in build_recipe_assets(c)]
    problems = [build_problem(c) for c in cards if c.problem is not None]
    return dg.Definitions(
        assets=[
            expert_index,
            *problems,
            *(d for d in built if not isinstance(d, dg.AssetChecksDefinition)),
        ],
        asset_checks=[d for d in built if isinstance(d, dg.AssetChecksDefinition)],
        jobs=[index_job, *jobs],
        schedules=nightly,
        sensors=[
            inbox_sensor,
            build_recipe_sensor(cards, jobs),
            build_reload_sensor(recipes_token(cards)),
        ],
        resources={"mergepipe": MergePipe(home=str(home.root), inbox_quiet_s=inbox_quiet_s)},
        executor=dg.in_process_executor,
    )


def build_job(card: RecipeCard) -> AssetJob:
    """One run of the whole chain; layers that the action cache knows are reused inside it."""
    selection = dg.AssetSelection.key_prefixes(card.name)
    return dg.define_asset_job(
        job_name(card), selection=selection, tags={"mergepipe/recipe": card.name}
    )


defs = build_definitions(
    Warehouse.at(os.environ.get("MERGEPIPE_HOME")).ensure(),
    inbox_quiet_s=float(os.environ.get("MERGEPIPE_INBOX_QUIET_S", "10")),
)
