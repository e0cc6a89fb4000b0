"""What Dagster's storage tells of runs: which work on a recipe, and how attempts at it ended."""

from collections.abc import Iterator, Mapping

import dagster as dg
from dagster import DagsterEventType as Event
from dagster import DagsterRunStatus as Status
from dagster_shared.error import SerializableErrorInfo

from mergepipe_pipeline.pipeline.retry import MOST_ATTEMPTS, Attempt, is_lasting, is_of_inputs

RECIPE_TAG = "mergepipe/recipe"
_ACTIVE = [Status.QUEUED, Status.NOT_STARTED, Status.STARTING, Status.STARTED, Status.CANCELING]
_FAILED = [Status.FAILURE, Status.CANCELED]
#: What Dagster raises for a blocking check: the same snapshot fails it again.
_CHECK_FAILED = "DagsterAssetCheckFailedError"


def recipes_under_way(instance: dg.DagsterInstance) -> set[str]:
    """The recipes that a run works on, or waits to; somebody's own choice of assets among them."""
    found = set[str]()
    for run in instance.get_runs(dg.RunsFilter(statuses=_ACTIVE)):
        found |= {key.path[0] for key in run.asset_selection or ()}
        if RECIPE_TAG in run.tags:
            found.add(run.tags[RECIPE_TAG])
    return found


def failed_attempts(instance: dg.DagsterInstance, tags: Mapping[str, str]) -> list[Attempt]:
    """The last runs with these tags that failed or were cancelled, oldest first."""
    runs = instance.get_run_records(_failed(tags), MOST_ATTEMPTS)
    return [_attempt(instance, r) for r in runs][::-1]


def count_failed(instance: dg.DagsterInstance, tags: Mapping[str, str]) -> int:
    """How many runs with these tags failed or were cancelled."""
    return instance.get_runs_count(_failed(tags))


def _failed(tags: Mapping[str, str]) -> dg.RunsFilter:
    return dg.RunsFilter(tags=dict(tags), statuses=_FAILED)


def _attempt(instance: dg.DagsterInstance, record: dg.RunRecord) -> Attempt:
    run, ended_s = record.dagster_run, record.end_time or record.update_timestamp.timestamp()
    if run.status is Status.CANCELED:
        return Attempt(ended_s, "it was cancelled", False)
    for log in instance.all_logs(run.run_id, of_type={Event.STEP_FAILURE, Event.RUN_FAILURE}):
        event = log.dagster_event
        if event and event.is_step_failure and event.step_failure_data.error:
            data = event.step_failure_data
            chain = list(_chain(data.error))
            names = {name for name, _ in chain}
            lasts = _CHECK_FAILED in names or is_lasting(names)
            told = data.user_failure_data and data.user_failure_data.description
            error = " ".join(told.split()) if told else chain[-1][1]
            return Attempt(ended_s, error, lasts, is_of_inputs(names))
        if event and event.message:
            return Attempt(ended_s, event.message, False)
    return Attempt(ended_s, "its run ended without an error of its own", False)


def _chain(error: SerializableErrorInfo | None) -> Iterator[tuple[str, str]]:
    """Class and first line of an error and of its causes, the root cause last."""
    while error:
        text = error.message.strip().removeprefix(f"{error.cls_name}: ")
        yield error.cls_name or "", " ".join(text.split())
        error = error.cause
