"""The disk of a standing warehouse does not fill: once a day, what nobody needs goes."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import pytest

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def _released(home: Warehouse, file: RecipeFile, budgets: list[str]) -> list[str]:
    """Snapshots of the recipe under these budgets, published one after the other, two days ago."""
    ids = []
    for budget in budgets:
        done = merge(home, file.recipe, relative_to=home.recipes, budget=budget, publish_ref=True)
        ids.append(done.outcome.snapshot.snapshot_id)
    long_ago = time.time() - 2 * 86400
    for path in (
        *home.snapshots.iterdir(),
        *home.stages.iterdir(),
        *home.root.glob("objects/*/*"),
        *home.actions_dir.rglob("*.json"),
    ):
        os.utime(path, (long_ago, long_ago))
    return ids


@pytest.mark.parametrize(("setting", "kept"), [("2", 2), ("", 3)])
def test_the_daily_run_keeps_as_many_versions_as_the_setting_says_and_shows_what_went(
    home: Warehouse,
    recipe_file: RecipeFile,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    kept: int,
) -> None:
    ids = _released(home, recipe_file, ["30%", "60%", "100%"])
    assert len(set(ids)) == 3
    monkeypatch.setenv("MERGEPIPE_KEEP_VERSIONS", setting)
    job = build_definitions(home).resolve_job_def("collect")
    done = job.execute_in_process(instance=instance)
    assert {path.name for path in home.snapshots.iterdir()} == set(ids[-kept:])
    (made,) = done.asset_materializations_for_node("free_space")
    shown: dict[str, Any] = {name: value.value for name, value in made.metadata.items()}
    assert shown["versions kept"] == (setting or "all")
    assert shown["disk GiB free"] > 0
    assert (ids[0] in str(shown.get("snapshots removed"))) == (kept == 2)


def test_it_runs_every_day_without_being_turned_on(home: Warehouse) -> None:
    (schedule,) = build_definitions(home).schedules or []
    assert isinstance(schedule, dg.ScheduleDefinition)
    assert schedule.default_status == dg.DefaultScheduleStatus.RUNNING
    assert (schedule.job_name, schedule.cron_schedule) == ("collect", "40 4 * * *")
    day = datetime(2026, 5, 1, 4, 40, tzinfo=UTC)
    with dg.build_schedule_context(scheduled_execution_time=day) as context:
        assert len(schedule.evaluate_tick(context).run_requests or []) == 1
