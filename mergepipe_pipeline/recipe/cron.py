"""When a recipe is to be merged: checks its cron schedule and time zone. Knows no Dagster.

A schedule has five fields and fires at least once. Forms that other parsers read differently (`?`,
`L`, `#`, `@daily`, ranges that wrap) are refused.
"""

from __future__ import annotations

import re
from zoneinfo import ZoneInfo

_NAMES = ("minute", "hour", "day", "month", "weekday")
_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_WORDS: tuple[dict[str, int], ...] = (
    {},
    {},
    {},
    {name: i for i, name in enumerate(_MONTHS, 1)},
    {name: i for i, name in enumerate(_WEEKDAYS)},
)
#: Of each month in a leap year: 29 February comes within eight years.
_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_VALUE = r"[0-9]{1,2}|[a-z]{3}"
_PART = re.compile(rf"(?:\*|({_VALUE})(?:-({_VALUE}))?)(?:/([0-9]{{1,2}}))?", re.ASCII)
#: Files beside the zones: this machine's own zone, and copies of all zones.
_NO_ZONE = re.compile("localtime|posixrules|Factory|(?:posix|right)/.*")


def is_time_zone(name: str) -> bool:
    """Whether a name is that of a time zone which is the same on every machine."""
    if _NO_ZONE.fullmatch(name):
        return False
    try:
        ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        return False
    return True


def cron_problem(schedule: str) -> str | None:
    """Say what is wrong with the schedule; None: nothing is."""
    fields = schedule.lower().split()
    if len(fields) != len(_RANGES):
        return f"expected five fields ({' '.join(_NAMES)}), found {len(fields)}"
    taken = []
    for i, field in enumerate(fields):
        values = _values(field, i)
        if values is None:
            lowest, highest = _RANGES[i]
            named = f" or {', '.join(_WORDS[i])}" if _WORDS[i] else ""
            return (
                f"the {_NAMES[i]} {field!r} is not `*`, values or ranges from {lowest} to {highest}"
                f"{named}, with steps like `*/2` or `1-5/2`"
            )
        taken.append(values)
    _, _, days, months, _ = taken
    # Also with a weekday beside it: Dagster looks for the day first, and fails.
    if all(min(days) > _DAYS[month - 1] for month in months):
        return "there is no such day: it never fires"
    return None


def when_merged(trigger: str, schedule: str | None, zone: str) -> str:
    """When the standing pipeline merges a recipe with this trigger and schedule, in words."""
    if trigger == "manual":
        return "merged only on request"
    parts = ["whenever an expert or the recipe changes"] if trigger == "change" else []
    parts += [] if schedule is None else [f"by schedule {schedule!r} ({zone})"]
    return f"merged {', and '.join(parts)}"


def _values(field: str, number: int) -> set[int] | None:
    """The values that the field of that number takes; None if it cannot be read."""
    values: set[int] = set()
    for part in field.split(","):
        match = _PART.fullmatch(part)
        bounds = None if match is None else _bounds(match[1], match[2], number)
        if match is None or bounds is None:
            return None
        first, last = bounds
        step = int(match[3] or 1)
        if step == 0 or step > max(1, last - first) or (match[3] and match[1] and not match[2]):
            return None
        values.update(range(first, last + 1, step))
    return values


def _bounds(first: str | None, last: str | None, number: int) -> tuple[int, int] | None:
    lowest, highest = _RANGES[number]
    if first is None:
        return lowest, highest
    words = _WORDS[number]
    try:
        start = words.get(first) if first in words else int(first)
        stop = start if last is None else words.get(last) if last in words else int(last)
    except ValueError:
        return None
    if start is None or stop is None or not lowest <= start <= stop <= highest:
        return None
    return start, stop
