"""How long a schedule may do nothing for a recipe before Dagster says that it is overdue."""

from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise

import dagster as dg
from dagster._utils.schedules import cron_string_iterator

from mergepipe_pipeline.assets.labels import labels
from mergepipe_pipeline.deploy.recipe_files import RecipeFile

#: What a scheduled run may take before its release is overdue.
GRACE = timedelta(hours=6)
_SPAN, _MOST_TIMES = timedelta(days=62), 1500


def build_on_schedule(file: RecipeFile) -> list[dg.AssetsDefinition]:
    """The asset that is overdue if a recipe's schedule passed in vain; none without a schedule.

    Without a schedule age says nothing: a release is right for as long as its inputs are the same,
    and `recipe_sensor` says each time whether they are. With one, each of its times either releases
    or confirms what is released. A confirmation is no event of the release, or what somebody makes
    from that would be made anew each night.
    """
    schedule = file.recipe.schedule
    if schedule is None:
        return []
    pause = _longest_pause(schedule, file.recipe.timezone or "UTC")
    spec = dg.AssetSpec(
        on_schedule_key(file.name),
        deps=[[file.name, "release"]],
        description="Shows when this recipe was last released, or its schedule found the release "
        "current; it is overdue if neither happened in time.",
        freshness_policy=dg.FreshnessPolicy.time_window(
            fail_window=pause + GRACE, warn_window=pause + GRACE / 3
        ),
        **labels(file, "clock"),
    )
    return [dg.AssetsDefinition(specs=[spec])]


def on_schedule_key(recipe: str) -> dg.AssetKey:
    """The key of that asset."""
    return dg.AssetKey([recipe, "on_schedule"])


@cache
def _longest_pause(schedule: str, zone: str) -> timedelta:
    """Between two times of a cron schedule, of those of two months, or of the next three."""
    start = datetime.now(UTC)
    times: list[datetime] = []
    for time in cron_string_iterator(start.timestamp(), schedule, zone):
        times.append(time)
        if len(times) >= 3 and (time - start > _SPAN or len(times) == _MOST_TIMES):
            break
    return max(b - a for a, b in pairwise(times))
