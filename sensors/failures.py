"""Tells of every run that failed, and of recipes of which nothing is made for long.

In the log, and to a webhook.
"""

import json
import logging
import time

import dagster as dg

from mergepipe_pipeline.assets.experts import EXPERTS_TAG
from mergepipe_pipeline.assets.searches import SEARCH_TAG
from mergepipe_pipeline.deploy.notify import RunFailure, post, run_failure, stalled
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.runs import RECIPE_TAG, Ours, attempt_of
from mergepipe_pipeline.sensors.ticks import interval_s, standing_sensor
from mergepipe_pipeline.settings import STALLED, WEBHOOK
from mergepipe_pipeline.text import in_one_line
from mergepipe_pipeline.verbs.deploy import Due, due

#: Recipes that one tick tells of: a webhook may take its time, and a tick has a minute.
_MOST_AT_ONCE = 3
_URL = WEBHOOK.value()


@dg.run_failure_sensor(
    name="failure_sensor",
    description=(
        "Says in one sentence why a run failed and what to do: in its tick's log and, if "
        f"{WEBHOOK.variable} is set, by a POST of JSON with text, recipe, run_id, cause and "
        "next_step."
    ),
    minimum_interval_seconds=interval_s(30),
    default_status=dg.DefaultSensorStatus.RUNNING,
)
def failure_sensor(context: dg.RunFailureSensorContext, mergepipe: MergePipe) -> None:
    """Tells of one failed run of ours; a webhook that fails harms nothing."""
    if Ours(context.instance, mergepipe.tags).has(context.dagster_run):
        tell(context.log, failure_of(context.instance, context.dagster_run))


def tell(log: logging.Logger, failure: RunFailure) -> None:
    """Tell of a failure in a tick's log and, if one is set, to the webhook."""
    log.error(failure.text)
    if problem := post(_URL, failure) if _URL else None:
        log.warning(f"{WEBHOOK.variable}: {problem}")


def failure_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> RunFailure:
    """Why a run failed, in words."""
    attempt = attempt_of(instance, run.run_id)
    recipe = run.tags.get(RECIPE_TAG, "")
    experts = run.tags.get("dagster/partition") or run.tags.get(EXPERTS_TAG)
    search = run.tags.get(SEARCH_TAG)
    named = f"Recipe {recipe}" if recipe else f"The search {search}" if search else ""
    what = named or (f"Indexing or packing of {experts}" if experts else run.job_name)
    error = in_one_line(attempt.error)
    return run_failure(what, recipe, run.run_id, error, fault=attempt.fault)


@standing_sensor(
    f"Says once of a recipe that cannot be used, or waits for an input, since {STALLED.variable} "
    f"({STALLED.shown}): in its tick's log and, if {WEBHOOK.variable} is set, as of a run that "
    "failed.",
    60,
)
def stalled_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
    """Tells of each recipe that stands still, once until it goes on; the cursor says since when."""
    before, now_s = json.loads(context.cursor or "{}"), time.time()
    after: dict[str, tuple[float, bool]] = {}
    count = 0
    for file in recipe_files(mergepipe.warehouse):
        where = due(mergepipe.warehouse, file)
        if isinstance(where, Due) or where.state not in ("waiting", "cannot be used"):
            continue
        since_s, is_reported = before.get(file.name, (now_s, False))
        since_s = min(since_s, now_s)  # the clock may have been set back
        if not is_reported and count < _MOST_AT_ONCE and now_s - since_s >= STALLED.value():
            count += 1
            failure = stalled(file.name, in_one_line(where.told), now_s - since_s)
            tell(context.log, failure)
            is_reported = True
        after[file.name] = since_s, is_reported
    said = ", ".join(sorted(after)) or "none"
    return dg.SensorResult(
        cursor=json.dumps(after), skip_reason=dg.SkipReason(f"recipes that stand still: {said}")
    )
