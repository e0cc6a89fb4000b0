"""Tells of recipes of which nothing is made for long, though no run fails that would say so."""

import json
import time

import dagster as dg

from mergepipe_pipeline.deploy.inbox import problem_now
from mergepipe_pipeline.deploy.notify import stalled
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors import interval_s
from mergepipe_pipeline.sensors.failures import tell
from mergepipe_pipeline.settings import STALLED, WEBHOOK
from mergepipe_pipeline.text import in_one_line
from mergepipe_pipeline.verbs.deploy import Postponed, due
from mergepipe_pipeline.warehouse import Warehouse

#: Recipes that one tick tells of: a webhook may take its time, and a tick has a minute.
_MOST_AT_ONCE = 3


@dg.sensor(
    name="stalled_sensor",
    description=(
        "Says once of a recipe that cannot be used, or waits for an input, since "
        f"{STALLED.variable} ({STALLED.shown}): in its tick's log and, if {WEBHOOK.variable} is "
        "set, as of a run that failed."
    ),
    minimum_interval_seconds=interval_s(60),
    target=None,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
def stalled_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
    """Tells of each recipe that stands still, once until it goes on; the cursor says since when."""
    before, now_s = json.loads(context.cursor or "{}"), time.time()
    after: dict[str, tuple[float, bool]] = {}
    count = 0
    for file in recipe_files(mergepipe.warehouse):
        why = reason_to_stand(mergepipe.warehouse, file)
        if why is None:
            continue
        since_s, is_reported = before.get(file.name, (now_s, False))
        since_s = min(since_s, now_s)  # the clock may have been set back
        if not is_reported and count < _MOST_AT_ONCE and now_s - since_s >= STALLED.value():
            count += 1
            failure = stalled(file.name, in_one_line(why), now_s - since_s)
            tell(context.log, failure)
            is_reported = True
        after[file.name] = since_s, is_reported
    said = ", ".join(sorted(after)) or "none"
    return dg.SensorResult(
        cursor=json.dumps(after), skip_reason=dg.SkipReason(f"recipes that stand still: {said}")
    )


def reason_to_stand(warehouse: Warehouse, file: RecipeFile) -> str | None:
    """Why nothing can be made of a recipe now; None if something can, or need not."""
    if file.problem is not None:
        return problem_now(warehouse, file)
    try:
        wanted = due(warehouse, file)
    except Exception as error:
        return str(error)
    return wanted.reason if isinstance(wanted, Postponed) else None
