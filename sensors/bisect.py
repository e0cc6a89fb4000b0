"""Watches refusals: one that was not traced yet is, where its recipe says `on_failure: bisect`."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.deploy.retry import reason_to_wait
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors import SOON_S, interval_s, separated
from mergepipe_pipeline.sensors.attempts import (
    ATTEMPT_TAG,
    RECIPE_TAG,
    failed_attempts,
    next_attempt,
    recipes_under_way,
)
from mergepipe_pipeline.sensors.ours import Ours
from mergepipe_pipeline.sensors.outage import while_writable
from mergepipe_pipeline.sensors.pools import make_pools_known
from mergepipe_pipeline.text import visible
from mergepipe_pipeline.verbs.trace import trace_due

#: The refusal that a run traces.
REFUSAL_TAG = "mergepipe/refusal"


def build_bisect_sensor(
    jobs: Mapping[str, Any], is_known: Callable[[], bool]
) -> dg.SensorDefinition:
    """The level-triggered sensor over the recipes that have a job for this, by name.

    `is_known` says whether the daemon knows them.
    """

    @dg.sensor(
        name="bisect_sensor",
        description=(
            "Has every refusal of a gate traced to the suspect, once; its ticks say "
            "of each recipe what is done and why."
        ),
        jobs=list(jobs.values()),
        minimum_interval_seconds=interval_s(SOON_S),
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    @while_writable
    def bisect_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
        """Requests the bisection of every refusal that has no result yet."""
        make_pools_known(context.instance)
        if not is_known():
            return dg.SensorResult(skip_reason=dg.SkipReason("definitions are being loaded"))
        ours = Ours.of(context, mergepipe)
        requests, lines = [], []
        for file in recipe_files(mergepipe.warehouse):
            if file.name not in jobs or file.problem is not None:
                continue
            asked = _request_or_reason(mergepipe, file, ours, jobs[file.name].name)
            if isinstance(asked, dg.RunRequest):
                requests.append(asked)
                asked = "a run is requested"
            lines.append(visible(f"{file.name}: {asked}"))
        if requests:
            context.log.info(separated(lines))
            return dg.SensorResult(run_requests=requests)
        return dg.SensorResult(skip_reason=dg.SkipReason(separated(lines) or "no recipes"))

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
    waiting = reason_to_wait(failed_attempts(ours, tags), time.time(), mergepipe.retry_s)
    if waiting is not None:
        return waiting
    attempt = next_attempt(ours, tags)
    return dg.RunRequest(
        run_key=f"{file.name}:{token}:{attempt}",
        job_name=job,
        tags={**tags, **ours.tags, ATTEMPT_TAG: attempt},
    )
