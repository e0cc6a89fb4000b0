"""Watches our runs: one whose process is gone is failed, so that its recipe and its slot are free.

Dagster's own monitoring asks the launcher, and the default one cannot tell. After a power loss runs
would stay started for ever, and so would one that was made and not put into the queue yet.
"""

import time

import dagster as dg
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors import interval_s
from mergepipe_pipeline.sensors.ours import Ours

#: Seconds without any event after which a run that has no lease is taken for dead: it ended before
#: it took one, its lease was collected, or nobody is left who would put it into the queue.
SILENCE_S = 120.0


@dg.sensor(
    description=(
        "Fails every run of ours whose process is gone, as after a power loss, so that its recipe "
        "is free to be merged again."
    ),
    minimum_interval_seconds=interval_s(30),
    target=None,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
def orphans_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SkipReason:
    """Ends every started run of ours whose process is gone, as after a power loss or an OOM kill,
    and every one that whoever made it did not live to put into the queue.
    """
    begun = [Status.NOT_STARTED, Status.STARTED, Status.CANCELING]
    runs = Ours.of(context, mergepipe).runs(begun)
    orphans = [run for run in runs if is_orphan(mergepipe, context.instance, run)]
    for run in orphans:
        message = "The process of this run is gone: it was killed, or the machine lost power."
        if run.status is Status.CANCELING:
            context.instance.report_run_canceled(run, message)
        else:
            context.instance.report_run_failed(run, message)
    ended = ", ".join(f"{run.job_name} {run.run_id[:8]}" for run in orphans)
    return dg.SkipReason(f"{len(runs)} runs under way; ended, since dead: {ended or 'none'}")


def is_orphan(mergepipe: MergePipe, instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether a run that is not in the queue has no living process."""
    lives = mergepipe.run_lives(run.run_id)
    if lives or (lives is None and _silent_s(instance, run) < SILENCE_S):
        return False
    again = instance.get_run_by_id(run.run_id)  # it may have ended since it was listed
    return again is not None and again.status is run.status


def _silent_s(instance: dg.DagsterInstance, run: dg.DagsterRun) -> float:
    last = instance.get_records_for_run(run.run_id, limit=1, ascending=False).records
    made = instance.get_run_record_by_id(run.run_id)
    since_s = made.create_timestamp.timestamp() if made else time.time()
    return time.time() - (last[0].timestamp if last else since_s)
