"""Keeps instance and disk in order: runs whose process is gone end, what is old goes.

Dagster's own monitoring asks the launcher whether a run lives, and the default one cannot tell.
After a power loss runs would stay started for ever, and so would one that was made and not put into
the queue yet.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import dagster as dg
from dagster import DagsterRunStatus as Status
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import TickStatus

from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.assets.space import build_free_space
from mergepipe_pipeline.deploy.instance import process_age_s
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.ticks import Ours, standing_sensor
from mergepipe_pipeline.settings import KEEP_RUNS

#: Seconds without any event after which a run that has no lease is taken for dead: it ended before
#: it took one, its lease was collected, or nobody is left who would put it into the queue.
SILENCE_S = 120.0
#: The same where somebody else's executor runs steps, and nobody knows whether its process lives.
GUEST_SILENCE_S = 3600.0
#: Seconds by which the clocks of a process and of its events may differ.
_CLOCK_S = 60.0
_OVER = [Status.SUCCESS, Status.FAILURE, Status.CANCELED]
_DAY_S = 86_400
_MOST_A_TICK = 50
#: For how long ticks that asked for nothing are kept: some sensors have 17,000 of them a day, and
#: Dagster counts in whole days.
IDLE_TICKS_S = 6 * 3600.0
_KEPT_DAYS = KEEP_RUNS.value()


def build_space(place: Place = ALONE) -> dg.Definitions:
    """What frees the space of what nobody needs: the asset, its job and its schedule."""
    asset, at = build_free_space(place), place.name("space_daily")
    job = dg.define_asset_job(
        place.name("collect"),
        selection=dg.AssetSelection.assets(asset),
        description=f"Removes what nobody needs, as `mergepipe gc` does; {at} starts it.",
    )
    daily = dg.ScheduleDefinition(
        name=at,
        job=job,
        cron_schedule="40 4 * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Frees the space of what nobody needs, once a day (UTC).",
    )
    return dg.Definitions(assets=place.translated([asset]), jobs=[job], schedules=[daily])


def build_orphans_sensor(place: Place = ALONE) -> dg.SensorDefinition:
    """The sensor that ends runs of ours whose process is gone."""

    @standing_sensor(
        "Fails every run of ours whose process is gone, as after a power loss, so that its recipe "
        "is free to be merged again.",
        30,
        place=place,
    )
    def orphans_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SkipReason:
        """Ends those, and every one that whoever made it did not live to put into the queue."""
        begun = [Status.NOT_STARTED, Status.STARTED, Status.CANCELING]
        if place.is_guest:
            begun.append(Status.STARTING)  # its instance may have no monitoring that ends these
        runs = Ours.of(context, mergepipe, place).runs(begun)
        orphans = [run for run in runs if is_orphan(mergepipe, context.instance, run, place)]
        for run in orphans:
            message = "The process of this run is gone: it was killed, or the machine lost power."
            if run.status is Status.CANCELING:
                context.instance.report_run_canceled(run, message)
            else:
                context.instance.report_run_failed(run, message)
        ended = ", ".join(f"{run.job_name} {run.run_id[:8]}" for run in orphans)
        return dg.SkipReason(f"{len(runs)} runs under way; ended, since dead: {ended or 'none'}")

    return orphans_sensor


def is_orphan(
    mergepipe: MergePipe, instance: dg.DagsterInstance, run: dg.DagsterRun, place: Place = ALONE
) -> bool:
    """Whether a run that is not in the queue has no living process.

    An executor of others holds no lease between two steps, and may wait long for a machine: while
    its own process may live, only a long silence tells.
    """
    lives = mergepipe.run_lives(run.run_id)
    silence_s = SILENCE_S if lives is None else 0.0
    if place.is_guest and not _worker_is_gone(instance, run):
        silence_s = GUEST_SILENCE_S
    if lives or _silent_s(instance, run) < silence_s:
        return False
    again = instance.get_run_by_id(run.run_id)  # it may have ended since it was listed
    return again is not None and again.status is run.status


def _worker_is_gone(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether the process that executes a run was on this machine, or none was, and none is now.

    Known where the daemon starts runs as processes of the code server, in which sensors tick.
    """
    if not isinstance(instance.run_coordinator, dg.QueuedRunCoordinator):
        return False
    if run.status is Status.NOT_STARTED or not isinstance(
        instance.run_launcher, dg.DefaultRunLauncher
    ):
        return run.status is Status.NOT_STARTED
    for log in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = log.dagster_event
        pid = event.engine_event_data.metadata.get("pid") if event else None
        if pid is not None:  # the first one is the run's own
            age_s = process_age_s(int(str(pid.value)))
            if age_s is None:
                return process_age_s(os.getpid()) is not None
            return time.time() - age_s > log.timestamp + _CLOCK_S  # another one has its number
    return run.status is Status.STARTING  # a process that still comes lets an ended run be


def _silent_s(instance: dg.DagsterInstance, run: dg.DagsterRun) -> float:
    last = instance.get_records_for_run(run.run_id, limit=1, ascending=False).records
    made = instance.get_run_record_by_id(run.run_id)
    since_s = made.create_timestamp.timestamp() if made else time.time()
    return time.time() - (last[0].timestamp if last else since_s)


def build_retention_sensor(place: Place = ALONE) -> dg.SensorDefinition:
    """The sensor that deletes what is old of ours."""

    @standing_sensor(
        f"Deletes runs of ours older than {KEEP_RUNS.variable} ({KEEP_RUNS.shown}), but not the "
        "last one that an asset shows, and after six hours ticks of ours that asked for nothing.",
        600,
        place=place,
    )
    def retention_sensor(
        context: dg.SensorEvaluationContext, mergepipe: MergePipe
    ) -> dg.SkipReason:
        """Deletes them, at most 50 a tick, so that no tick is long."""
        ours = Ours.of(context, mergepipe, place)
        if not place.is_guest:  # what is kept of theirs, the instance's settings say
            delete_idle_ticks(ours, time.time() - IDLE_TICKS_S)
        gone = delete_runs(ours, time.time() - _KEPT_DAYS * _DAY_S)
        return dg.SkipReason(f"{gone} runs older than {_KEPT_DAYS:g} days deleted")

    return retention_sensor


def delete_idle_ticks(ours: Ours, before: float) -> None:
    """Delete the ticks of our sensors that asked for nothing, begun before a time in seconds."""
    for state in ours.instance.all_instigator_state(instigator_type=InstigatorType.SENSOR):
        if ours.has_sensor(state):
            ids = state.instigator_origin_id, state.selector_id
            ours.instance.purge_ticks(*ids, before, [TickStatus.SKIPPED])


def delete_runs(ours: Ours, before: float) -> int:
    """Delete finished runs of ours that were made before a time in seconds; how many there were.

    A run stays while it is the last that made an asset, a partition of one, or ran its checks.
    """
    old = [run.run_id for run in ours.runs_before(_OVER, before)]
    if not old:
        return 0
    instance = ours.instance
    shown = _shown(instance)
    gone = [run_id for run_id in old if run_id not in shown][:_MOST_A_TICK]
    for run_id in gone:
        instance.delete_run(run_id)
        _delete_file(instance, run_id)
    return len(gone)


def _shown(instance: dg.DagsterInstance) -> set[str]:
    """The runs that assets, their partitions and their checks show as their last."""
    run_ids = set[str]()
    for record in instance.get_asset_records():
        entry = record.asset_entry
        if entry.last_run_id:
            run_ids.add(entry.last_run_id)
        last = entry.last_materialization
        if last:
            run_ids.add(last.run_id)
        if last and last.asset_materialization and last.asset_materialization.partition:
            run_ids |= _shown_of_partitions(instance, entry.asset_key)
    return run_ids


def _shown_of_partitions(instance: dg.DagsterInstance, key: dg.AssetKey) -> set[str]:
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    ids = instance.event_log_storage.get_latest_storage_id_by_partition(key, kind)
    wanted = dg.EventRecordsFilter(kind, asset_key=key, storage_ids=[*ids.values()])
    return {r.event_log_entry.run_id for r in instance.get_event_records(wanted)}


def _delete_file(instance: dg.DagsterInstance, run_id: str) -> None:
    """Dagster empties the SQLite file of a run, but leaves it, and what the run printed."""
    root = Path(instance.root_directory)
    for path in (root / "history" / "runs").glob(f"{run_id}.db*"):
        with suppress(OSError):
            path.unlink()
    instance.compute_log_manager.delete_logs(prefix=[run_id])
