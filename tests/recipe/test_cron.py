"""A schedule that is taken here is taken by Dagster, and fires; one that never fires is refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from dagster._utils.schedules import cron_string_iterator, is_valid_cron_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.recipe.cron import cron_problem, when_merged
from tests.support.laws import examples

_VALUES = st.integers(0, 61).map(str) | st.sampled_from(
    ["jan", "dec", "sun", "SAT", "mon", "00", "07", "x", "é", "٣", "L", "?"]
)
_PARTS = st.one_of(
    st.just("*"),
    _VALUES,
    st.builds("{}-{}".format, _VALUES, _VALUES),
    st.builds("*/{}".format, st.integers(0, 61)),
    st.builds("{}-{}/{}".format, _VALUES, _VALUES, st.integers(0, 61)),
)
_FIELDS = _PARTS | st.lists(_PARTS, min_size=1, max_size=3).map(",".join)
#: Close to right, so that much of it is taken.
_LIKELY = st.tuples(
    st.integers(0, 59).map(str) | st.just("*/7"),
    st.integers(0, 23).map(str) | st.just("*"),
    st.sampled_from(["*", "30", "31", "29", "1-31/29", "*/15", "30,31"]),
    st.sampled_from(["*", "2", "feb", "4,6", "feb-apr/2", "*/11", "9-11/2"]),
    st.sampled_from(["*", "mon", "0", "7", "sun-fri", "*/2", "1-5/2", "5-7"]),
)
_SCHEDULES = _LIKELY.map(" ".join) | st.lists(_FIELDS, min_size=4, max_size=6).map(" ".join)


@settings(max_examples=examples(300))
@given(_SCHEDULES)
def test_what_is_taken_here_dagster_takes_and_it_fires_within_eight_years(schedule: str) -> None:
    if cron_problem(schedule) is None:
        assert is_valid_cron_schedule(schedule)
        now = datetime(2027, 1, 1, tzinfo=UTC)
        found = next(cron_string_iterator(now.timestamp(), schedule, "UTC"))
        assert (found - now).days < 8 * 366


@pytest.mark.parametrize(
    ("trigger", "schedule", "told"),
    [
        ("manual", None, "merged only on request"),
        ("change", None, "merged whenever an expert or the recipe changes"),
        (
            "nightly",
            "0 3 * * *",
            "merged by schedule '0 3 * * *' (Europe/Berlin)",
        ),
        (
            "change",
            "0 3 * * *",
            "merged whenever an expert or the recipe changes, and by schedule '0 3 * * *' "
            "(Europe/Berlin)",
        ),
    ],
)
def test_it_is_said_in_words_when_a_recipe_is_merged(
    trigger: str, schedule: str | None, told: str
) -> None:
    assert when_merged(trigger, schedule, "Europe/Berlin") == told


@pytest.mark.parametrize(
    "schedule",
    ["0 3 * * *", "*/5 1-3 1,15 * 0", "0 0 29 2 *", "15 2 * JAN-mar/2 sun,tue"],
)
def test_common_schedules_are_taken(schedule: str) -> None:
    assert cron_problem(schedule) is None


@pytest.mark.parametrize("schedule", ["0 0 30 2 *", "0 0 31 2,4,6,9,11 *", "0 0 30-31 feb mon"])
def test_a_schedule_that_never_fires_is_refused(schedule: str) -> None:
    assert cron_problem(schedule) == "there is no such day: it never fires"


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ("", "found 0"),
        ("0 0 1 * * *", "found 6"),
        ("@daily", "found 1"),
        ("60 * * * *", "the minute '60'"),
        ("0 24 * * *", "the hour '24'"),
        ("0 0 0 * *", "the day '0'"),
        ("0 0 * foo *", "the month 'foo'"),
        ("0 0 * * fri-mon", "the weekday 'fri-mon'"),
        ("5/3 * * * *", "the minute '5/3'"),
        ("*/0 * * * *", "the minute '*/0'"),
        ("1,,2 * * * *", "the minute '1,,2'"),
        ("0 0 l * *", "the day 'l'"),
        ("٣ * * * *", "the minute"),
    ],
)
def test_a_bad_field_is_named(schedule: str, told: str) -> None:
    assert told in (cron_problem(schedule) or "")
