"""Watches refusals: one that was not traced yet is, where its recipe says `on_failure: bisect`."""

from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.runs import (
    RECIPE_TAG,
    Ours,
    recipes_under_way,
    request_or_reason_to_wait,
)
from mergepipe_pipeline.sensors.ticks import (
    LOADING,
    SOON_S,
    asked,
    make_pools_known,
    separated,
    standing_sensor,
)
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

    @standing_sensor(
        "Has every refusal of a gate traced to the suspect, once; its ticks say of each recipe "
        "what is done and why.",
        SOON_S,
        list(jobs.values()),
    )
    def bisect_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
        """Requests the bisection of every refusal that has no result yet."""
        make_pools_known(context.instance)
        if not is_known():
            return dg.SensorResult(skip_reason=dg.SkipReason(LOADING))
        ours = Ours.of(context, mergepipe)
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
