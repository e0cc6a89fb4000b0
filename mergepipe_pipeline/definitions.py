"""Which definitions exist: the one place, built from the recipes of the warehouse.

Loaded by `workspace.yaml`. Loading reads recipe files and the catalog, never a weight, and does not
import torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import dagster as dg

from mergepipe_pipeline.assets.experts import (
    build_expert_index,
    build_usable,
    experts_of,
    index_burst,
)
from mergepipe_pipeline.assets.labels import problem_asset
from mergepipe_pipeline.assets.metadata import description
from mergepipe_pipeline.assets.recipes import (
    build_bisect,
    build_bisect_job,
    build_problem,
    build_recipe_assets,
    is_traced,
)
from mergepipe_pipeline.assets.searches import build_search_assets, build_search_jobs
from mergepipe_pipeline.assets.space import free_space
from mergepipe_pipeline.assets.status import build_status
from mergepipe_pipeline.deploy.instance import identity_of
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.deploy.retry import MOST_ATTEMPTS
from mergepipe_pipeline.deploy.standing import how_to_begin
from mergepipe_pipeline.resources import Engine, MergePipe, build_executor
from mergepipe_pipeline.sensors.failures import failure_sensor, stalled_sensor
from mergepipe_pipeline.sensors.housekeeping import (
    orphans_sensor,
    retention_sensor,
    space_daily,
    space_job,
)
from mergepipe_pipeline.sensors.inbox import build_inbox_sensor, index_job
from mergepipe_pipeline.sensors.recipes import (
    AssetJob,
    build_bisect_sensor,
    build_nightly,
    build_recipe_sensor,
    job_name,
)
from mergepipe_pipeline.sensors.reload import build_reload_sensor, files_token, spreading
from mergepipe_pipeline.sensors.searches import build_search_sensor
from mergepipe_pipeline.settings import SHARDS
from mergepipe_pipeline.verbs.search import StandingSearch, standing_searches
from mergepipe_pipeline.warehouse import Warehouse


def build_definitions(
    home: Warehouse,
    mergepipe: MergePipe | None = None,
    is_known: Callable[[], bool] = lambda: True,
    shards: int | None = None,
) -> dg.Definitions:
    """The definitions of one warehouse, with its resource (by default as the environment says).

    `is_known`: whether the daemon has heard of them, as far as one has to.
    `shards`: the steps that a merge is split into, by default as the environment says.

    A recipe that cannot be used is one asset that says why, and has no job.
    """
    files = recipe_files(home)
    searches = standing_searches(home, files)
    token = files_token(identity_of(home), (*files, *searches))
    shared = dg.Definitions(
        sensors=[build_reload_sensor(token)],
        resources={"mergepipe": mergepipe or MergePipe(home=str(home.root)), "engine": Engine()},
        executor=build_executor(home),
    )
    return dg.Definitions.merge(
        shared,
        _of_warehouse(home),
        _of_recipes(files, shards or SHARDS.value(), is_known),
        _of_searches(home, searches, is_known),
    )


def _of_warehouse(home: Warehouse) -> dg.Definitions:
    """The definitions without any recipe; their assets say how to begin."""
    experts = experts_of(home)
    land, write = (description(text) for text in how_to_begin(home))
    begin = f"To begin, {land}; then {write}."

    def with_begin(spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.replace_attributes(description=f"{spec.description}\n\n{begin}")

    (index,) = dg.map_asset_specs(with_begin, [build_expert_index(experts)])
    return dg.Definitions(
        assets=[build_status(begin), index, free_space],
        asset_checks=[build_usable(experts)],
        jobs=[index_job, index_burst, space_job],
        schedules=[space_daily],
        sensors=[
            build_inbox_sensor(experts),
            *(orphans_sensor, retention_sensor, failure_sensor, stalled_sensor),
        ],
    )


def _of_recipes(
    files: Sequence[RecipeFile], shards: int, is_known: Callable[[], bool]
) -> dg.Definitions:
    """Of every recipe its chain, or one asset that says why it cannot be used."""
    built = list[dg.AssetsDefinition | dg.AssetChecksDefinition]()
    jobs, bisections = dict[str, AssetJob](), dict[str, AssetJob]()
    schedules, refused = list[dg.ScheduleDefinition](), dict[str, str]()
    for file in files:
        problem = file.problem
        if problem is None:
            try:
                job, bisection = build_job(file), build_bisect_job(file)
                nightly = build_nightly(file, job)  # it says best what is wrong with a schedule
                chain = [*build_recipe_assets(file, shards), *build_bisect(file)]
            except Exception as error:  # whatever it is, it is this recipe's alone
                problem = refused[file.token] = f"Dagster refuses this recipe: {error}"
        if problem is not None:
            built.append(build_problem(replace(file, layers=(), problem=problem)))
            continue
        built += chain
        jobs[file.name] = job
        schedules += [nightly] if nightly else []
        bisections |= {file.name: bisection} if bisection else {}
    loaded = [file for file in files if file.name in jobs]
    return dg.Definitions(
        assets=[d for d in built if not isinstance(d, dg.AssetChecksDefinition)],
        asset_checks=[d for d in built if isinstance(d, dg.AssetChecksDefinition)],
        jobs=[*jobs.values(), *bisections.values()],
        schedules=schedules,
        sensors=[
            build_recipe_sensor(loaded, refused, list(jobs.values()), is_known),
            *([build_bisect_sensor(bisections, is_known)] if bisections else []),
        ],
    )


def _of_searches(
    home: Warehouse, files: Sequence[StandingSearch], is_known: Callable[[], bool]
) -> dg.Definitions:
    """Of every search its assets, or one that says why it cannot be used; no sensor without any."""
    identity = identity_of(home)
    usable = [file for file in files if file.problem is None]
    jobs = {file.name: build_search_jobs(file) for file in usable}
    return dg.Definitions(
        assets=[
            *(asset for file in usable for asset in build_search_assets(file, identity)),
            *(problem_asset(file, "prior") for file in files if file.problem is not None),
        ],
        jobs=[job for steps in jobs.values() for job in steps.values()],
        sensors=[build_search_sensor(jobs, identity, is_known)] if files else [],
    )


def build_job(file: RecipeFile) -> AssetJob:
    """One run of the whole chain; layers that the action cache knows are reused inside it."""
    selection: dg.AssetSelection = dg.AssetSelection.key_prefixes(file.name)
    if is_traced(file):
        selection -= dg.AssetSelection.assets([file.name, "bisect"])
    return dg.define_asset_job(
        job_name(file),
        selection=selection,
        description=(
            f"Merges {file.name} and releases it: plan, merge, snapshot, its checks, release. "
            "Layers that are known are reused; recipe_sensor starts it when an input changed."
        ),
        tags={"mergepipe/recipe": file.name},
        # For a worker that is gone: what a step itself fails of is no run's to try again.
        op_retry_policy=dg.RetryPolicy(max_retries=MOST_ATTEMPTS),
    )


defs = build_definitions(Warehouse.at(), is_known=spreading())
