"""Tells of every run that failed: in the log, and to a webhook."""

import logging

import dagster as dg

from mergepipe_pipeline.assets.experts import EXPERTS_TAG
from mergepipe_pipeline.assets.searches import SEARCH_TAG
from mergepipe_pipeline.deploy.notify import RunFailure, post, run_failure
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors import interval_s
from mergepipe_pipeline.sensors.attempts import RECIPE_TAG, attempt_of
from mergepipe_pipeline.sensors.ours import Ours
from mergepipe_pipeline.settings import WEBHOOK
from mergepipe_pipeline.text import in_one_line

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
