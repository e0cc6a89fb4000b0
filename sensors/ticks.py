"""The common parts of sensors: how they tick and tell, and the runs that they ask for and look at.

A run is ours if it carries the identity of our warehouse and no other code location made it: a copy
of a warehouse has the identity of the original. A run without any, which waits in the queue, is
ours if our location made it and loads nothing but this package.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

import dagster as dg
from dagster import DagsterEventType as Event
from dagster import DagsterRunStatus as Status
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.events import JobFailureData
from dagster._core.scheduler.instigation import InstigatorState
from dagster._core.storage.tags import REPOSITORY_LABEL_TAG
from dagster_shared.error import SerializableErrorInfo

from mergepipe_pipeline.assets.experts import EXPERTS_TAG
from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.assets.searches import SEARCH_TAG
from mergepipe_pipeline.deploy.copies import settle
from mergepipe_pipeline.deploy.instance import is_refused, own_name
from mergepipe_pipeline.deploy.retry import (
    MOST_ATTEMPTS,
    SILENT,
    Attempt,
    Fault,
    fault_of,
    reason_to_wait,
)
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resources import WAREHOUSE_TAG, MergePipe
from mergepipe_pipeline.settings import SENSOR_INTERVAL
from mergepipe_pipeline.text import plain_of_markdown
from mergepipe_pipeline.warehouse import Warehouse

ACTIVE = [Status.QUEUED, Status.NOT_STARTED, Status.STARTING, Status.STARTED, Status.CANCELING]
#: The module that loads nothing but ours.
_MODULE = "mergepipe_pipeline.definitions"
#: All our sensors, whose ticks are ours.
SENSORS = frozenset(
    f"{name}_sensor"
    for name in (
        *("inbox", "orphans", "recipe", "reload", "retention"),
        *("failure", "stalled", "bisect", "search", "landing"),
    )
)
RECIPE_TAG = "mergepipe/recipe"
#: The number of a run among those at the same; a person's runs have that of the run they repeat.
ATTEMPT_TAG = "mergepipe/attempt"
#: Tags of which each run of our own jobs has one.
_WORK_TAGS = {RECIPE_TAG, SEARCH_TAG, EXPERTS_TAG}
_FAILED = [Status.FAILURE, Status.CANCELED]
#: Runs that a look reads, those of persons among them; of failed ones the others are counted.
_MOST_READ = 20
#: What Dagster raises for a blocking check: the same snapshot fails it again.
_CHECK_FAILED = "DagsterAssetCheckFailedError"
#: How Dagster begins to tell of a run whose process is gone.
_OUTSIDE = "This run has been marked as failed from outside"
#: For sensors that somebody waits for. Dagster looks every 5 s: with 5 here, a tick that began late
#: in one look would be skipped in the next.
SOON_S = 4
#: Lines of which a tick that asks for nothing tells: every one is stored.
MAX_LINES = 20
#: Why nothing is asked for that definitions are needed for.
LOADING = "its definitions are being loaded"
#: Places in the queue, the highest first. Merges, single arrivals and what a person starts have 0.
BURST_PRIORITY, NIGHTLY_PRIORITY = "-1", "-2"


@dataclass(frozen=True)
class Ours:
    """The part of an instance that one code location may touch.

    `tags` are those of our runs; `label` names the location as Dagster's storage does, None where
    nobody says it, as to a schedule or outside of a location; `place` names what is ours there.
    """

    instance: dg.DagsterInstance
    tags: Mapping[str, str]
    label: str | None = None
    place: Place = ALONE

    @staticmethod
    def of(
        context: dg.SensorEvaluationContext | dg.ScheduleEvaluationContext,
        mergepipe: MergePipe,
        place: Place = ALONE,
    ) -> "Ours":
        """Ours as a tick sees it."""
        label = None
        if isinstance(context, dg.SensorEvaluationContext) and context.code_location_origin:
            location = context.code_location_origin.location_name
            label = f"{context.repository_name}@{location}"
        return Ours(context.instance, mergepipe.tags, label, place)

    @property
    def sensors(self) -> frozenset[str]:
        """The names of all sensors that we may have."""
        return frozenset(map(self.place.name, SENSORS))

    @property
    def location(self) -> dict[str, str]:
        """The tag of what our location made; none where nobody says which that is."""
        return {} if self.label is None else {REPOSITORY_LABEL_TAG: self.label}

    def has(self, run: dg.DagsterRun) -> bool:
        """Whether a run is ours."""
        made = run.remote_job_origin
        if made and self.label not in (None, made.repository_origin.get_label()):
            return False
        if self.place.only_own and not _WORK_TAGS & run.tags.keys():
            return False
        if WAREHOUSE_TAG in run.tags:
            return self.tags.items() <= run.tags.items()
        return made is not None and not self.place.is_guest and _loads_ours_alone(run)

    def runs(
        self, statuses: Sequence[Status], tags: Mapping[str, str] | None = None
    ) -> list[dg.DagsterRun]:
        """Our runs of these statuses with these tags, the newest first."""
        wanted = dg.RunsFilter(statuses=list(statuses), tags=dict(tags or {}))
        return [run for run in self.instance.get_runs(wanted) if self.has(run)]

    def runs_before(self, statuses: Sequence[Status], created_s: float) -> list[dg.DagsterRun]:
        """Our runs of these statuses that were made before a time in seconds, the oldest first."""
        # Others may keep very many: storage looks for what our location made, or our warehouse.
        tags = self.location or self.tags
        before = datetime.fromtimestamp(created_s).astimezone()
        wanted = dg.RunsFilter(statuses=list(statuses), tags=dict(tags), created_before=before)
        return [run for run in self.instance.get_runs(wanted, ascending=True) if self.has(run)]

    def has_sensor(self, state: InstigatorState) -> bool:
        """Whether a state that the instance keeps is of a sensor of ours."""
        return (
            state.instigator_name in self.sensors
            and state.origin.repository_origin.get_label() == self.label
        )


def _loads_ours_alone(run: dg.DagsterRun) -> bool:
    """Whether the location that made a run loads only our definitions."""
    origin = run.job_code_origin
    pointer = origin.repository_origin.code_pointer if origin else None
    return isinstance(pointer, ModuleCodePointer) and pointer.module == _MODULE


def recipes_under_way(ours: Ours) -> set[str]:
    """The recipes that a run works on, or waits to; somebody's own choice of assets among them."""
    recipes = set[str]()
    for run in ours.runs(ACTIVE):
        recipes |= {ours.place.recipe_of(key) for key in run.asset_selection or ()}
        if RECIPE_TAG in run.tags:
            recipes.add(run.tags[RECIPE_TAG])
    return recipes


def failed_attempts(ours: Ours, tags: Mapping[str, str]) -> list[Attempt]:
    """Our last runs with these tags that failed or were cancelled, oldest first.

    What a person executed again with a configuration of its own is no attempt: another budget or
    device may fail where what is asked for does not.
    """
    instance = ours.instance
    wanted = dg.RunsFilter(tags={**tags, **ours.tags}, statuses=_FAILED)
    # After a month without storage there are hundreds, and every tick asks.
    read = instance.get_run_records(wanted, limit=_MOST_READ)
    failed = [r for r in read if not r.dagster_run.run_config]
    number = len(failed)
    if len(read) == _MOST_READ and number >= MOST_ATTEMPTS:
        number += instance.get_runs_count(wanted) - len(read)
    elif len(read) == _MOST_READ:
        failed = [r for r in instance.get_run_records(wanted) if not r.dagster_run.run_config]
        number = len(failed)
    return [_attempt(instance, r, number - i) for i, r in enumerate(failed[:MOST_ATTEMPTS])][::-1]


def attempt_of(instance: dg.DagsterInstance, run_id: str) -> Attempt:
    """How a run that failed or was cancelled ended."""
    (record,) = instance.get_run_records(dg.RunsFilter(run_ids=[run_id]))
    return _attempt(instance, record)


def request(
    ours: Ours,
    key: str,
    tags: Mapping[str, str],
    more: Mapping[str, str] | None = None,
    **about: Any,
) -> dg.RunRequest:
    """A run at what `tags` say, with a number that no run at the same has: no two have one key.

    However they ended: a release whose record was lost is made once more, after a run that
    succeeded. Counting does not do: people delete runs, and so does `retention_sensor`.
    """
    numbers = (int(run.tags.get(ATTEMPT_TAG, 0)) for run in ours.runs([], tags))
    attempt = str(max(numbers, default=0) + 1)
    named = {**tags, **ours.tags, ATTEMPT_TAG: attempt, **(more or {})}
    return dg.RunRequest(run_key=f"{key}:{attempt}", tags=named, **about)


def request_or_reason_to_wait(
    ours: Ours, key: str, tags: Mapping[str, str], retry_s: float, **about: Any
) -> dg.RunRequest | str:
    """The same, unless attempts at it have failed lately: then why not."""
    waiting = reason_to_wait(failed_attempts(ours, tags), time.time(), retry_s)
    return request(ours, key, tags, **about) if waiting is None else waiting


def _attempt(instance: dg.DagsterInstance, record: dg.RunRecord, number: int = 1) -> Attempt:
    error, fault = _ending(instance, record.dagster_run)
    ended_s = record.end_time or record.update_timestamp.timestamp()
    return Attempt(ended_s, error, fault, number)


def _ending(instance: dg.DagsterInstance, run: dg.DagsterRun) -> tuple[str, Fault]:
    """Why a run ended that gave nothing, and whose fault that was."""
    if run.status is Status.CANCELED:
        return "it was cancelled", Fault.UNKNOWN
    for log in instance.all_logs(run.run_id, of_type={Event.STEP_FAILURE, Event.RUN_FAILURE}):
        event = log.dagster_event
        if event and event.is_step_failure and event.step_failure_data.error:
            data = event.step_failure_data
            chain = list(_chain(data.error))
            if any(name == _CHECK_FAILED for name, _ in chain):
                return _refusals(instance, run.run_id) or chain[-1][1], Fault.LASTING
            text = data.user_failure_data and data.user_failure_data.description
            error = " ".join(text.split()) if text else chain[-1][1]
            # An executor tells of a step whose process is gone by an error of no class.
            is_lost = not any(name for name, _ in chain)
            return error, Fault.SURROUNDINGS if is_lost else fault_of(chain)
        if event and event.is_run_failure:
            # An error before any step, as of a wrong configuration, or none: the process is gone.
            ended = event.event_specific_data
            errors = list(_chain(ended.error if isinstance(ended, JobFailureData) else None))
            if errors:
                return errors[-1][1], fault_of(errors)
            text = event.message or ""
            return SILENT if text.startswith(_OUTSIDE) else text, Fault.SURROUNDINGS
    return "its run ended without an error of its own", Fault.UNKNOWN


def _refusals(instance: dg.DagsterInstance, run_id: str) -> str:
    refusals = []
    for log in instance.all_logs(run_id, of_type=Event.ASSET_CHECK_EVALUATION):
        event = log.dagster_event
        if event and not event.asset_check_evaluation_data.passed:
            evaluated = event.asset_check_evaluation_data
            where = f"{evaluated.asset_key.to_user_string()}: {evaluated.check_name}"
            refusals.append(f"{where}: {plain_of_markdown(evaluated.description or 'it failed')}")
    return "; ".join(refusals)


def _chain(error: SerializableErrorInfo | None) -> Iterator[tuple[str, str]]:
    """Class and first line of an error and of its causes, the root cause last."""
    while error:
        text = error.message.strip().removeprefix(f"{error.cls_name}: ")
        yield error.cls_name or "", " ".join(text.split())
        error = error.cause


def interval_s(usual_s: int) -> int:
    """Seconds between the ticks of a sensor, as its setting says, or what is usual."""
    return SENSOR_INTERVAL.value() or usual_s


def standing_sensor(
    description: str,
    usual_s: int,
    jobs: Sequence[Any] | None = None,
    place: Place = ALONE,
    assets: Sequence[dg.AssetKey] | None = None,
) -> Callable[[Callable[..., Any]], dg.SensorDefinition]:
    """A sensor of ours from a function, named as that, and on from the start.

    One that asks for runs of `jobs`, or of `assets` in their place, asks for nothing while the
    warehouse cannot be written: they would fail.
    """

    def decorate(tick: Callable[..., Any]) -> dg.SensorDefinition:
        sensor = dg.sensor(
            name=place.sensor(tick.__name__),
            description=description,
            jobs=jobs if assets is None else None,
            asset_selection=assets,
            minimum_interval_seconds=interval_s(usual_s),
            default_status=dg.DefaultSensorStatus.RUNNING,
        )
        settled = _settling(tick) if place.is_guest else tick
        return sensor(place.bound(settled if jobs is None else _while_writable(settled)))

    return decorate


def asked(
    context: dg.SensorEvaluationContext,
    requests: Sequence[dg.RunRequest],
    lines: Sequence[str],
    nothing: str,
    **more: Any,
) -> dg.SensorResult:
    """The result of a tick: its runs, with all lines in its log, else `nothing` as its reason."""
    if not requests:
        return dg.SensorResult(skip_reason=dg.SkipReason(nothing), **more)
    context.log.info(separated(lines))
    return dg.SensorResult(run_requests=list(requests), **more)


def separated(reasons: Sequence[str]) -> str:
    """Reasons of a tick, each on a line with a dot before it: the UI shows all in one line."""
    return "".join(reasons) if len(reasons) < 2 else "\n".join(f"• {r}" for r in reasons)


def _settling(tick: Callable[..., Any]) -> Callable[..., Any]:
    """A tick before which the copies go that its location does not ask for any more."""

    @wraps(tick)
    def settled(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> Any:
        if label := Ours.of(context, mergepipe).label:
            settle(mergepipe.warehouse, label)
        return tick(context, mergepipe)

    return settled


def _while_writable(tick: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(tick)
    def patient(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> Any:
        root = mergepipe.warehouse.root
        try:
            if not os.access(root, os.W_OK):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(root))
            return tick(context, mergepipe)
        except OSError as error:
            if not is_refused(error):
                raise
            why = f"{error.filename or root}: {error.strerror}"
        said = f"the warehouse cannot be written: {why}; all goes on once it can be"
        return dg.SensorResult(skip_reason=dg.SkipReason(said))

    return patient


def refuse_empty(ours: Ours, warehouse: Warehouse) -> None:
    """Raise MergePipeError if a warehouse of which Dagster knows experts holds nothing at all.

    It is made where it is not there, and so on the mount point of a disk that is gone.
    """
    folders = (warehouse.recipes, warehouse.inbox)
    if any(any(folder.iterdir()) for folder in folders) or warehouse.catalog.names():
        return
    known = _known(ours)
    if not known:
        return
    raise MergePipeError(
        "The warehouse is empty, though Dagster knows of its experts",
        where=str(warehouse.root),
        expected=f"a catalog with {known} experts",
        found="an empty catalog, no recipe, and nothing in the inbox",
        next_step="mount its disk again, and all goes on; if it is empty on purpose, put a "
        "checkpoint into its inbox",
    )


def _known(ours: Ours) -> int:
    """How many experts Dagster knows of the warehouse that the last runs here were of.

    One that is made on a mount point has an identity of its own.
    """
    known = 0
    for job in map(ours.place.name, ("index_experts", "index_burst")):
        wanted = dg.RunsFilter(job_name=job, tags=ours.location)
        runs = ours.instance.get_runs(wanted, limit=_MOST_READ)
        for identity in {run.tags[WAREHOUSE_TAG] for run in runs if WAREHOUSE_TAG in run.tags}:
            experts = ours.instance.get_dynamic_partitions(own_name("experts", identity))
            known = max(known, len(experts))
    return known


def make_pool_known(instance: dg.DagsterInstance, pool: str) -> None:
    """Give a pool the default limit of `dagster.yaml` if it has none yet.

    Dagster does so when a run that needs the pool waits in the queue, but only after it has listed
    the pools that it obeys in that look: a burst that is the first of an instance would start as
    many runs as there are places.
    """
    storage = instance.event_log_storage
    if instance.global_op_concurrency_default_limit is None:
        return
    if pool not in {limit.name for limit in storage.get_pool_limits()}:
        storage.initialize_concurrency_limit_to_default(pool)


def limit_pool(instance: dg.DagsterInstance, pool: str, most: int) -> None:
    """Let at most so many runs take a place of a pool at once."""
    storage = instance.event_log_storage
    if (pool, most) not in {(limit.name, limit.limit) for limit in storage.get_pool_limits()}:
        storage.set_concurrency_slots(pool, most)
