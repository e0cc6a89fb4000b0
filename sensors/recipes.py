"""Watches recipes: wanted state against released state, so that no event can be lost.

The files decide, read at each tick, and what the runs of one wanted state gave; definitions that
were loaded earlier only say which jobs there are. A refusal that was not traced yet is, where its
recipe says `on_failure: bisect`.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.assets.recipes import on_schedule_key
from mergepipe_pipeline.assets.status import changed_status
from mergepipe_pipeline.deploy.inbox import reason_to_wait_for_packs
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.deploy.recorded import last_written_s
from mergepipe_pipeline.deploy.retry import NEXT, Attempt, Fault, reason_to_wait
from mergepipe_pipeline.deploy.standing import Standing, failing, first_steps, standing
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.ticks import (
    ATTEMPT_TAG,
    LOADING,
    MAX_LINES,
    NIGHTLY_PRIORITY,
    RECIPE_TAG,
    SOON_S,
    Ours,
    asked,
    failed_attempts,
    make_pool_known,
    recipes_under_way,
    refuse_empty,
    request,
    request_or_reason_to_wait,
    separated,
    standing_sensor,
)
from mergepipe_pipeline.sensors.wants import Wanting, as_condition_sensor, decide
from mergepipe_pipeline.text import visible
from mergepipe_pipeline.verbs.bisect import trace_due
from mergepipe_pipeline.verbs.deploy import CURRENT, Due, Release, due, last_release

#: What `dg.define_asset_job` returns; Dagster exports no name for it.
AssetJob = Any
#: Why nothing is requested of a recipe that a run works on.
RUNNING = "a run is under way"
_WHOSE = {"nightly": "its schedule", "manual": "a person"}
_STALE = (
    "its definitions were made before its file could be read as it is. Next: reload the code "
    "location"
)
#: The refusal that a run traces.
REFUSAL_TAG = "mergepipe/refusal"


def job_name(file: RecipeFile, place: Place = ALONE) -> str:
    """The job that runs a recipe's whole chain."""
    return place.name(f"merge_{file.identifier}")


def _named(file: RecipeFile, place: Place) -> RecipeFile:
    """A recipe whose texts name the job that it has here."""
    return replace(file, job=job_name(file, place))


def request_or_reason(
    mergepipe: MergePipe,
    file: RecipeFile,
    ours: Ours,
    busy: Collection[str],
    *,
    is_time: bool,
) -> dg.RunRequest | Standing:
    """A run of the recipe's chain if its release is not what its inputs ask for, else why not.

    `busy` are the recipes that runs work on; `is_time`: the recipe's schedule asks. What it cannot
    get at that moment is made as soon as it can be. A file that cannot be read stops no other
    recipe.
    """
    wanted, owed = _due(mergepipe, file, busy, is_time=is_time), _owed(mergepipe, file)
    if isinstance(wanted, Standing):
        return wanted
    waiting = reason_to_wait_for_packs(mergepipe.warehouse, file) if mergepipe.packs else None
    if waiting is not None and not is_time:  # the schedule asks once a night
        return standing(file, "waiting", waiting)
    tags = {
        RECIPE_TAG: file.name,
        "mergepipe/wanted": wanted.wanted,
        # A change and its undoing both run.
        "mergepipe/sequence": str(wanted.sequence),
        "mergepipe/inputs": wanted.inputs,
    }
    failed = failed_attempts(ours, tags)
    # What the schedule asked for once and did not get is tried again by day.
    is_owed = bool(failed) or (file.recipe.trigger == "nightly" and owed.exists())
    if not is_time and not is_owed and file.recipe.trigger != "change":
        said = f"it is to be merged, which its trigger leaves to {_WHOSE[file.recipe.trigger]}"
        return standing(file, "to be merged", said)
    attempts = _telling(mergepipe, file, failed)
    waiting = reason_to_wait(attempts, time.time(), mergepipe.retry_s)
    if waiting is not None:
        return failing(file, attempts, waiting, mergepipe.retry_s)
    is_late = is_time or file.recipe.trigger == "nightly"
    key = f"{file.name}:{wanted.sequence}:{wanted.wanted}:{wanted.inputs}"
    later = {"dagster/priority": NIGHTLY_PRIORITY} if is_late else None
    return request(ours, key, tags, later, job_name=job_name(file, ours.place))


def _due(
    mergepipe: MergePipe, file: RecipeFile, busy: Collection[str], *, is_time: bool
) -> Due | Standing:
    """The release that is to be made, or why none is.

    What a schedule cannot get now is owed, until there is nothing to be made.
    """
    owed, wanted = _owed(mergepipe, file), due(mergepipe.warehouse, file)
    if isinstance(wanted, Due):
        if file.name not in busy:
            return wanted
        wanted = standing(file, "running", RUNNING)
    if wanted.state in ("current", "refused"):
        if owed.exists():  # of a warehouse that can only be read, this much can be asked
            owed.unlink(missing_ok=True)
    elif is_time:
        owed.touch()
    return wanted


def _owed(mergepipe: MergePipe, file: RecipeFile) -> Path:
    return mergepipe.warehouse.postponed_path(file.name)


def _telling(
    mergepipe: MergePipe, file: RecipeFile, failed: Sequence[Attempt]
) -> Sequence[Attempt]:
    """The failed attempts that tell what another one would give."""
    if failed and failed[-1].fault is Fault.LASTING:  # a file may be mended with its time kept
        written_s = last_written_s(mergepipe.warehouse, file.members)
        # A time after now is of a clock that was set back: no attempt would ever come after it.
        return [a for a in failed if not a.ended_s < written_s <= time.time()]
    return failed


def build_recipe_sensor(
    loaded: Sequence[RecipeFile],
    refused: Mapping[str, str],
    jobs: Mapping[str, AssetJob],
    place: Place = ALONE,
    names: Collection[str] | None = None,
    wanting: Mapping[str, Wanting] | None = None,
) -> dg.SensorDefinition:
    """The level-triggered sensor over all recipe files, or those of these `names`.

    `loaded` are the recipes with a job; `refused` says why Dagster takes no definitions of a file,
    by the file's token. Where recipes are `wanting`, their conditions decide, and their assets are
    run without a job.
    """
    unready = _unready(loaded, refused, place)

    @standing_sensor(
        "Starts the merge of every recipe whose release is not what its inputs ask for; its ticks "
        "say of each recipe what is done and why, but only count many that are current.",
        SOON_S,
        list(jobs.values()),
        place,
        [key for one in wanting.values() for key in one.chain] if wanting else None,
    )
    def recipe_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
        """Requests the chain of every recipe whose inputs, as indexed, are not what it released.

        A tick that requests runs tells of every recipe in its log, others as `_idle` does.
        """
        instance, ours = context.instance, Ours.of(context, mergepipe, place)
        busy = recipes_under_way(ours)
        make_pool_known(instance, place.running.pool)
        found = recipe_files(mergepipe.warehouse)
        files = [_named(f, place) for f in found if names is None or f.name in names]
        refuse = partial(unready, place.is_known(context))
        requests, states = _look(mergepipe, ours, busy, refuse, files)
        requests, more = decide(context, wanting, requests, states) if wanting else (requests, {})
        first = None if states else first_steps(mergepipe.warehouse)
        shown = []
        if not place.is_guest:
            shown = changed_status(instance, ours.tags, states, first, datetime.now(UTC))
        if not requests:
            current = {name for name, where in states.items() if where.state == "current"}
            _show_releases(ours, mergepipe, sorted(current.difference(busy)))
        nothing = _idle(states) or first or "no recipes"
        return asked(context, requests, _lines(states), nothing, asset_events=shown, **more)

    return as_condition_sensor(recipe_sensor) if wanting else recipe_sensor


def _unready(
    loaded: Sequence[RecipeFile],
    refused: Mapping[str, str],
    place: Place,
) -> Callable[[bool, RecipeFile], Standing | None]:
    """What says why a recipe has no job yet, if so; it is given whether definitions are known."""
    as_loaded = {file.name: _as_defined(file, place) for file in loaded}

    def unready(is_known: bool, file: RecipeFile) -> Standing | None:
        if file.problem is not None:  # `due` says which
            return None
        if reason := refused.get(file.token):
            return standing(file, "cannot be used", reason)
        if is_known and as_loaded.get(file.name) == _as_defined(file, place):
            return None
        return standing(file, "waiting", _STALE if place.is_guest else LOADING)

    return unready


def _as_defined(file: RecipeFile, place: Place) -> Any:
    """What the definitions of a recipe follow from, as far as they are not known by name."""
    return file.parsed and file.parsed.text if place.is_guest else file.layers


def _show_releases(ours: Ours, mergepipe: MergePipe, current: Sequence[str]) -> None:
    """Report the releases of recipes that are current and of which Dagster has no event.

    Their runs were ended once they had published, or worked for an instance that is gone.
    """
    instance = ours.instance
    keys = {ours.place.key(name, "release"): name for name in current}
    records = instance.get_asset_records(list(keys)) if keys else ()  # one query
    entries = {r.asset_entry.asset_key: r.asset_entry for r in records}
    for key, name in keys.items():
        made = entries[key].last_materialization if key in entries else None
        last = last_release(mergepipe.warehouse, name)
        if last and (not made or (made.tags or {}).get("dagster/data_version") != last.snapshot_id):
            said = "It was published, and no run was left to say so."
            event = dg.AssetMaterialization(
                key,
                description=said,
                metadata=_metadata(last),
                tags={"dagster/data_version": last.snapshot_id},
            )
            instance.report_runless_asset_event(event)


def _look(
    mergepipe: MergePipe,
    ours: Ours,
    busy: Collection[str],
    unready: Callable[[RecipeFile], Standing | None],
    files: Sequence[RecipeFile],
) -> tuple[list[dg.RunRequest], dict[str, Standing]]:
    """The runs to request, and where each recipe is; `unready` says why one has no job yet."""
    requests, states = list[dg.RunRequest](), dict[str, Standing]()
    for file in files:
        asked: Standing | dg.RunRequest | None = unready(file)
        asked = asked or request_or_reason(mergepipe, file, ours, busy, is_time=False)
        if isinstance(asked, dg.RunRequest):
            requests.append(asked)
            said = f"a run is requested, attempt {asked.tags[ATTEMPT_TAG]}"
            asked = replace(standing(file, "running", RUNNING), told=said)
        states[file.name] = asked
    return requests, states


def _lines(states: Mapping[str, Standing]) -> list[str]:
    return [visible(f"{name}: {_line(where)}") for name, where in states.items()]


def _line(where: Standing) -> str:
    return f"{where.told}.{NEXT}{where.then}" if where.state == "to be merged" else where.told


def _idle(states: Mapping[str, Standing]) -> str:
    """Why nothing is requested: of many recipes those that are current are counted, and others
    from the first on told.
    """
    if len(states) <= MAX_LINES:
        return separated(_lines(states))
    others = {name: where for name, where in states.items() if where.state != "current"}
    more = len(others) - MAX_LINES
    lines = [*_lines(others)[:MAX_LINES], *([f"{more} more"] if more > 0 else [])]
    return separated([*lines, f"{len(states) - len(others)} recipes: {CURRENT}"])


def build_nightly(file: RecipeFile, place: Place = ALONE) -> dg.ScheduleDefinition | None:
    """The recipe's nightly run, at the cron time its `schedule` names; None without one."""
    schedule = file.recipe.schedule
    if schedule is None:
        return None

    @dg.schedule(
        name=place.name(f"nightly_merge_{file.identifier}"),
        description=(
            f"Merges {file.name} at this time if its inputs changed, and else confirms its release."
        ),
        job_name=job_name(file, place),
        cron_schedule=schedule,
        execution_timezone=file.recipe.timezone,
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
    @place.bound
    def nightly(
        context: dg.ScheduleEvaluationContext, mergepipe: MergePipe
    ) -> dg.RunRequest | dg.SkipReason:
        """Runs the chain unless the release is current, or has failed too often."""
        ours = Ours.of(context, mergepipe, place)
        refuse_empty(ours, mergepipe.warehouse)  # this is asked again each minute
        busy = recipes_under_way(ours)
        named = _named(file, place)
        request = request_or_reason(mergepipe, named, ours, busy, is_time=True)
        if isinstance(request, dg.RunRequest):
            return request
        if request.state == "current":
            # It is as fresh as its schedule asks, and its age must not say otherwise.
            last = last_release(mergepipe.warehouse, file.name)
            assert last is not None
            _confirm(ours, last)
        return dg.SkipReason(visible(request.told))

    return nightly


def _confirm(ours: Ours, last: Release) -> None:
    """Say that the schedule passed, and that a release stays, which asks for nothing downstream."""
    said, metadata = "The schedule found nothing to merge: the release is current.", _metadata(last)
    key = on_schedule_key(last.recipe, ours.place)
    event = dg.AssetMaterialization(key, description=said, metadata=metadata)
    ours.instance.report_runless_asset_event(event)
    release = ours.place.key(last.recipe, "release")
    observation = dg.AssetObservation(release, description=said, metadata=metadata)
    ours.instance.report_runless_asset_event(observation)


def _metadata(last: Release) -> dict[str, str | int]:
    return {"snapshot id": last.snapshot_id, "releases of this recipe": last.sequence}


def build_bisect_sensor(jobs: Mapping[str, Any], place: Place = ALONE) -> dg.SensorDefinition:
    """The level-triggered sensor over the recipes that have a job for this, by name."""

    @standing_sensor(
        "Has every refusal of a gate traced to the suspect, once; its ticks say of each recipe "
        "what is done and why.",
        SOON_S,
        list(jobs.values()),
        place,
    )
    def bisect_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
        """Requests the bisection of every refusal that has no result yet."""
        make_pool_known(context.instance, place.running.pool)
        if not place.is_known(context):
            return dg.SensorResult(skip_reason=dg.SkipReason(LOADING))
        ours = Ours.of(context, mergepipe, place)
        requests, lines = list[dg.RunRequest](), list[str]()
        for file in recipe_files(mergepipe.warehouse):
            if file.name not in jobs or file.problem is not None:
                continue
            said = _request_or_reason(mergepipe, file, ours, jobs[file.name].name)
            if isinstance(said, dg.RunRequest):
                requests.append(said)
                said = "a run is requested"
            lines.append(visible(f"{file.name}: {said}"))
        return asked(context, requests, lines, separated(lines) or "no recipes")

    return bisect_sensor


def _request_or_reason(
    mergepipe: MergePipe, file: RecipeFile, ours: Ours, job: str
) -> dg.RunRequest | str:
    """A run that traces what the recipe's gate refused, or why none is asked for."""
    try:
        token = trace_due(mergepipe.warehouse, file)
    except Exception as error:  # it is this recipe's alone
        return str(error)
    if token is None:
        return "nothing is refused that was not traced"
    if file.name in recipes_under_way(ours):
        return "a run is under way"
    tags = {RECIPE_TAG: file.name, REFUSAL_TAG: token}
    key = f"{file.name}:{token}"
    return request_or_reason_to_wait(ours, key, tags, mergepipe.retry_s, job_name=job)
