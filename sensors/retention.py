"""Deletes old runs of ours from Dagster's storage, and ticks sooner than Dagster can be told to."""

import time
from contextlib import suppress
from pathlib import Path

import dagster as dg
from dagster import DagsterRunStatus as Status
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import TickStatus

from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors import interval_s
from mergepipe_pipeline.sensors.ours import Ours
from mergepipe_pipeline.settings import KEEP_RUNS

_OVER = [Status.SUCCESS, Status.FAILURE, Status.CANCELED]
_DAY_S = 86_400
_MOST_A_TICK = 50
#: For how long ticks that asked for nothing are kept: some sensors have 17,000 of them a day, and
#: Dagster counts in whole days.
IDLE_TICKS_S = 6 * 3600.0
_KEPT_DAYS = KEEP_RUNS.value()


@dg.sensor(
    description=(
        f"Deletes runs of ours older than {KEEP_RUNS.variable} ({KEEP_RUNS.shown}), but not the "
        "last one that an asset shows, and after six hours ticks of ours that asked for nothing."
    ),
    minimum_interval_seconds=interval_s(600),
    target=None,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
def retention_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SkipReason:
    """Deletes runs of ours older than its setting says, but not what an asset shows last.

    At most 50 a tick, so that no tick is long. Ticks that asked for nothing go after six hours.
    """
    ours = Ours.of(context, mergepipe)
    delete_idle_ticks(ours, time.time() - IDLE_TICKS_S)
    gone = delete_runs(ours, time.time() - _KEPT_DAYS * _DAY_S)
    return dg.SkipReason(f"{gone} runs older than {_KEPT_DAYS:g} days deleted")


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
