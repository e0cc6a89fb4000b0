"""The parts that definitions are made of, at a place: experts, recipes, searches, housekeeping.

A recipe or search that cannot be used is one asset that says why, and has no job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg

from mergepipe_pipeline.assets.experts import build_expert_index, build_usable, experts_of
from mergepipe_pipeline.assets.labels import problem_asset
from mergepipe_pipeline.assets.landings import build_landing_job
from mergepipe_pipeline.assets.place import Place
from mergepipe_pipeline.assets.recipes import (
    build_bisect,
    build_bisect_job,
    build_problem,
    build_recipe_assets,
)
from mergepipe_pipeline.assets.searches import build_search_assets, build_search_jobs
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, StandingFile
from mergepipe_pipeline.deploy.retry import MOST_ATTEMPTS
from mergepipe_pipeline.resources import Engine, MergePipe
from mergepipe_pipeline.sensors.failures import build_failure_sensor, build_stalled_sensor
from mergepipe_pipeline.sensors.housekeeping import (
    build_orphans_sensor,
    build_retention_sensor,
    build_space,
)
from mergepipe_pipeline.sensors.inbox import build_inbox_sensor, build_index_jobs
from mergepipe_pipeline.sensors.landings import build_landing_sensor
from mergepipe_pipeline.sensors.recipes import (
    AssetJob,
    build_bisect_sensor,
    build_nightly,
    build_recipe_sensor,
    job_name,
)
from mergepipe_pipeline.sensors.searches import build_search_sensor
from mergepipe_pipeline.sensors.wants import Wanting
from mergepipe_pipeline.verbs.search import StandingSearch
from mergepipe_pipeline.warehouse import Warehouse


def resources(mergepipe: MergePipe, engine: Engine, place: Place) -> dict[str, Any]:
    """The resources of a place, under its names."""
    return {place.resource: mergepipe, place.name("engine"): engine}


def of_inbox(home: Warehouse, place: Place, begin: str = "") -> dg.Definitions:
    """What makes landed checkpoints known; the asset says how to `begin`."""
    experts, jobs = experts_of(home), build_index_jobs(place)

    def with_begin(spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.replace_attributes(description=f"{spec.description}\n\n{begin}".rstrip())

    index = build_expert_index(experts, place).map_asset_specs(with_begin)
    return dg.Definitions(
        assets=place.translated([index]),
        asset_checks=[build_usable(experts, place)],
        jobs=jobs,
        sensors=[build_inbox_sensor(experts, jobs, place)],
    )


def of_housekeeping(place: Place) -> dg.Definitions:
    """What keeps disk and instance in order, and tells of failures."""
    sensors = [
        *(build_orphans_sensor(place), build_retention_sensor(place)),
        *(build_failure_sensor(place), build_stalled_sensor(place)),
    ]
    return dg.Definitions.merge(build_space(place), dg.Definitions(sensors=sensors))


def of_recipes(
    files: Sequence[RecipeFile], shards: int, place: Place, *, by_condition: bool = False
) -> dg.Definitions:
    """Of every recipe its chain, or one asset that says why it cannot be used.

    A guest's need only be readable: what they lack may come while definitions stay. `by_condition`:
    the conditions of their plans start them.
    """
    built = list[dg.AssetsDefinition | dg.AssetChecksDefinition]()
    jobs, bisections, wanting = dict[str, AssetJob](), dict[str, AssetJob](), dict[str, Wanting]()
    schedules, refused = list[dg.ScheduleDefinition](), dict[str, str]()
    for file in files:
        problem = None if place.is_guest and file.parsed is not None else file.problem
        if problem is None:
            try:
                nightly = build_nightly(file, place)  # it says best what is wrong with a schedule
                chain = build_recipe_assets(file, shards, place)
                job, bisection = _job(file, chain, place), build_bisect_job(file, place)
                wants = Wanting(place.key(file.name, "plan"), _keys(chain))
                chain = wants.with_condition(chain) if by_condition else chain
                chain = place.translated([*chain, *build_bisect(file, place)])
            except Exception as error:  # whatever it is, it is this recipe's alone
                problem = refused[file.token] = f"Dagster refuses this recipe: {error}"
            else:
                built += chain
                jobs[file.name] = job
                wanting |= {file.name: wants} if by_condition else {}
                schedules += [nightly] if nightly else []
                bisections |= {file.name: bisection} if bisection else {}
                continue
        told = replace(file, layers=(), problem=problem)
        built += place.translated([build_problem(told, place)])
    own = [file for file in files if file.name in jobs]
    names = [file.name for file in files] if place.is_guest else None
    sensors = [build_recipe_sensor(own, refused, jobs, place, names, wanting)]
    if bisections:
        sensors.append(build_bisect_sensor(bisections, place))
    return dg.Definitions(
        assets=[d for d in built if not isinstance(d, dg.AssetChecksDefinition)],
        asset_checks=[d for d in built if isinstance(d, dg.AssetChecksDefinition)],
        jobs=[*jobs.values(), *bisections.values()],
        schedules=schedules,
        sensors=sensors,
    )


def _job(
    file: RecipeFile,
    chain: Sequence[dg.AssetsDefinition | dg.AssetChecksDefinition],
    place: Place,
) -> AssetJob:
    """One run of the whole chain; layers that the action cache knows are reused inside it."""
    sensor = place.sensor("recipe_sensor")
    return dg.define_asset_job(
        job_name(file, place),
        selection=dg.AssetSelection.assets(*_keys(chain)),
        description=(
            f"Merges {file.name} and releases it: plan, merge, snapshot, its checks, release. "
            f"Layers that are known are reused; {sensor} starts it when an input changed."
        ),
        tags={"mergepipe/recipe": file.name, **place.tags},
        executor_def=place.running.executor,
        # For a worker that is gone: what a step itself fails of is no run's to try again.
        op_retry_policy=dg.RetryPolicy(max_retries=MOST_ATTEMPTS),
    )


def _keys(chain: Sequence[dg.AssetsDefinition | dg.AssetChecksDefinition]) -> list[dg.AssetKey]:
    return [key for d in chain if d.is_executable for key in d.keys]


def of_landings(files: Sequence[StandingFile], place: Place) -> dg.Definitions:
    """What lands for the experts of recipes or searches; nothing lands in the place of a run."""
    chosen = [s.selector for file in files if isinstance(file, RecipeFile) for s in file.selected]
    names = set(place.makers) if chosen else {name for file in files for name in file.members}
    names -= {selector.run for selector in chosen}
    makers = {name: maker for name, maker in place.makers.items() if name in names}
    if not makers:
        return dg.Definitions()
    job = build_landing_job(makers, place)
    return dg.Definitions(jobs=[job], sensors=[build_landing_sensor(makers, job, place)])


def of_searches(files: Sequence[StandingSearch], identity: str, place: Place) -> dg.Definitions:
    """Of every search its assets, or one that says why it cannot be used; no sensor without any."""
    jobs, built = dict[str, Mapping[str, Any]](), list[dg.AssetsDefinition]()
    for file in files:
        if file.problem is not None and not (place.is_guest and file.file is not None):
            built.append(problem_asset(file, "prior", place=place))
            continue
        built += build_search_assets(file, identity, place)
        jobs[file.name] = build_search_jobs(file, place)
    return dg.Definitions(
        assets=place.translated(built),
        jobs=[job for steps in jobs.values() for job in steps.values()],
        sensors=[build_search_sensor(jobs, identity, place)] if files else [],
    )
