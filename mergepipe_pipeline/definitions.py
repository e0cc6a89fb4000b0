"""Which definitions exist: the one place, built from the recipes of the warehouse.

Loaded by `workspace.yaml`. Loading reads recipe files and the catalog, never a weight, and does not
import torch.
"""

import time
from dataclasses import dataclass, replace

import dagster as dg

from assets.bisect import build_bisect, build_bisect_job
from assets.experts import expert_index, index_burst
from assets.problems import problem_asset
from assets.recipes import build_problem, build_recipe_assets
from assets.searches import build_search_assets, build_search_jobs
from mergepipe_pipeline.cluster.executors import build_executor
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.resources import Engine, MergePipe
from mergepipe_pipeline.settings import SHARDS
from mergepipe_pipeline.verbs.standing_searches import search_cards
from mergepipe_pipeline.warehouse import Warehouse
from sensors.bisect import build_bisect_sensor
from sensors.failures import failure_sensor
from sensors.inbox import inbox_sensor, index_job
from sensors.orphans import orphans_sensor
from sensors.recipes import (
    AssetJob,
    build_nightly,
    build_recipe_sensor,
    job_name,
)
from sensors.reload import build_reload_sensor, definitions_token
from sensors.retention import retention_sensor
from sensors.searches import build_search_sensor


def build_definitions(
    home: Warehouse,
    mergepipe: MergePipe | None = None,
    loaded_s: float = 0.0,
    shards: int | None = None,
) -> dg.Definitions:
    """The definitions of one warehouse, with its resource (by default as the environment says).

    `loaded_s`: when they were loaded, in seconds since 1970, if a daemon has yet to hear of them.
    `shards`: the steps that a merge is split into, by default as the environment says.

    A recipe that cannot be used is one asset that says why, and has no job.
    """
    cards = recipe_files(home)
    parts = [_parts(c, shards or SHARDS.value()) for c in cards]
    problems = [p for p in parts if isinstance(p, RecipeFile)]
    chains = [p for p in parts if not isinstance(p, RecipeFile)]
    jobs = [chain.job for chain in chains]
    traced = {chain.card.name: chain.bisect for chain in chains if chain.bisect}
    built = [d for chain in chains for d in chain.assets]
    searches = _searches(home, cards)
    refused = {
        card.token: p.problem or ""
        for card, p in zip(cards, parts, strict=True)
        if isinstance(p, RecipeFile) and card.problem is None
    }
    return dg.Definitions(
        assets=[
            expert_index,
            *(build_problem(card) for card in problems),
            *(d for d in built if not isinstance(d, dg.AssetChecksDefinition)),
            *searches.assets,
        ],
        asset_checks=[d for d in built if isinstance(d, dg.AssetChecksDefinition)],
        jobs=[index_job, index_burst, *jobs, *traced.values(), *searches.jobs],
        schedules=[chain.nightly for chain in chains if chain.nightly],
        sensors=[
            inbox_sensor,
            orphans_sensor,
            build_recipe_sensor([chain.card for chain in chains], refused, jobs, loaded_s),
            build_reload_sensor(definitions_token(home)),
            retention_sensor,
            failure_sensor,
            *([build_bisect_sensor(traced)] if traced else []),
            *searches.sensors,
        ],
        resources={"mergepipe": mergepipe or MergePipe(home=str(home.root)), "engine": Engine()},
        executor=build_executor(home),
    )


@dataclass(frozen=True)
class _Chain:
    """The definitions of one recipe that can be used."""

    card: RecipeFile
    job: AssetJob
    nightly: dg.ScheduleDefinition | None
    bisect: AssetJob | None
    assets: list[dg.AssetsDefinition | dg.AssetChecksDefinition]


@dataclass(frozen=True)
class _Searches:
    """The definitions of all searches; no sensor where there is no search file."""

    assets: list[dg.AssetsDefinition]
    jobs: list[AssetJob]
    sensors: list[dg.SensorDefinition]


def _searches(home: Warehouse, recipes: tuple[RecipeFile, ...]) -> _Searches:
    """Of every search file its assets, or one that says why it cannot be used."""
    cards = search_cards(home, recipes)
    usable = [card for card in cards if card.problem is None]
    jobs = {card.name: build_search_jobs(card) for card in usable}
    return _Searches(
        [
            *(asset for card in usable for asset in build_search_assets(card)),
            *(problem_asset(card, "prior") for card in cards if card.problem is not None),
        ],
        [job for steps in jobs.values() for job in steps.values()],
        [build_search_sensor(jobs)] if cards else [],
    )


def _parts(card: RecipeFile, shards: int) -> _Chain | RecipeFile:
    """The definitions of a recipe, or its card with the problem, one that Dagster has included."""
    if card.problem is not None:
        return card
    try:
        job = build_job(card)
        nightly = build_nightly(card, job)  # first: it says best what is wrong with a schedule
        assets = [*build_recipe_assets(card, shards), *build_bisect(card)]
        return _Chain(card, job, nightly, build_bisect_job(card), assets)
    except Exception as error:  # whatever it is, it is this recipe's alone
        return replace(card, layers=(), problem=f"Dagster refuses this recipe: {error}")


def build_job(card: RecipeFile) -> AssetJob:
    """One run of the whole chain; layers that the action cache knows are reused inside it."""
    selection: dg.AssetSelection = dg.AssetSelection.key_prefixes(card.name)
    if build_bisect_job(card):
        selection -= dg.AssetSelection.assets([card.name, "bisect"])
    return dg.define_asset_job(
        job_name(card),
        selection=selection,
        description=(
            f"Merges {card.name} and releases it: plan, merge, snapshot, its checks, release. "
            "Layers that are known are reused; recipe_sensor starts it when an input changed."
        ),
        tags={"mergepipe/recipe": card.name},
    )


defs = build_definitions(Warehouse.at(), loaded_s=time.time())
