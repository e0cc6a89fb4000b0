"""How old a release may be before Dagster says that it is overdue."""

from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise

import dagster as dg
from dagster._utils.schedules import cron_string_iterator

from mergepipe_pipeline.deploy.recipe_files import RecipeFile

#: What a scheduled run may take before its release is overdue.
GRACE = timedelta(hours=6)
_SPAN, _MOST_TIMES = timedelta(days=62), 1500


def release_freshness(file: RecipeFile) -> dg.FreshnessPolicy | None:
    """A release is overdue if its recipe's schedule passed without one; None without a schedule.

    Without a schedule age says nothing: a release is right for as long as its inputs are the same,
    and `recipe_sensor` says each time whether they are. With one, each of its times either releases
    or confirms what is released, so that the last event is never older than the longest pause.
    """
    schedule = file.recipe.schedule
    if schedule is None:
        return None
    pause = _longest_pause(schedule, file.recipe.timezone or "UTC")
    return dg.FreshnessPolicy.time_window(fail_window=pause + GRACE, warn_window=pause + GRACE / 3)


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
