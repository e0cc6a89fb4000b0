"""Nights under a real daemon: what a schedule asks for is merged, and what was slept through."""

from __future__ import annotations

import time

import pytest
from dagster import DagsterRunStatus as Status
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import RemoteInstigatorOrigin, RemoteRepositoryOrigin
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    InstigatorTick,
    ScheduleInstigatorData,
)
from dagster._core.workspace.load_target import WorkspaceFileTarget

from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.dagster_layer.daemon import REPOSITORY, Daemon
from tests.dagster_layer.test_experts import sum_of

pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore::Warning")]


def sleep_through(daemon: Daemon, schedule: str, cron: str, seconds: float) -> InstigatorState:
    """Store the schedule as a daemon that ended so long ago would have left it."""
    (location,) = WorkspaceFileTarget([str(REPOSITORY / "workspace.yaml")]).create_origins()
    origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(location, "__repository__"), schedule)
    data = ScheduleInstigatorData(cron, time.time() - seconds)
    status = InstigatorStatus.DECLARED_IN_CODE
    with daemon.instance as instance:
        return instance.add_instigator_state(
            InstigatorState(origin, InstigatorType.SCHEDULE, status, data)
        )


def daemon_of_indexed(home: Warehouse, drop: Drop) -> Daemon:
    """A daemon that does not run yet, over a warehouse whose base and expert are indexed."""
    daemon = Daemon(home)
    for name in ("base", "expert_00"):
        drop(name)
    with daemon.instance as instance:
        Ticker(home, instance).tick()
    return daemon


def test_a_night_that_passed_without_a_daemon_is_merged_when_one_starts(
    home: Warehouse, drop: Drop
) -> None:
    daemon = daemon_of_indexed(home, drop)
    recipe = sum_of("base", "expert_00")
    cron = f"{time.gmtime(time.time() - 60).tm_min} * * * *"  # once, while no daemon ran
    home.recipe_path("n").write_text(f"{recipe}schedule: '{cron}'\n")
    home.recipe_path("m").write_text(f"{recipe}trigger: manual\n")
    state = sleep_through(daemon, "nightly_merge_n", cron, 180)
    started = time.time()
    try:
        daemon.start()
        daemon.wait_for("the merge", lambda: daemon.runs("merge_n", Status.SUCCESS))
    finally:
        daemon.kill()
    with daemon.instance as instance:
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id)
    (run,) = daemon.runs("merge_n")
    (asked,) = (tick for tick in ticks if tick.run_ids)
    assert list(asked.run_ids) == [run.run_id]
    assert asked.timestamp < started
    assert last_release(home, "n")
    assert not daemon.runs("merge_m")


def test_a_night_in_whose_minute_the_warehouse_cannot_be_used_is_merged_once_it_can(
    home: Warehouse, drop: Drop
) -> None:
    daemon = daemon_of_indexed(home, drop)
    cron = f"{time.gmtime(time.time() - 60).tm_min} * * * *"
    text = f"{sum_of('base', 'expert_00')}trigger: nightly\nschedule: '{cron}'\n"
    home.recipe_path("n").write_text(text)
    state = sleep_through(daemon, "nightly_merge_n", cron, 180)
    aside = home.releases.with_name("aside")
    home.releases.rename(aside)
    home.releases.write_bytes(b"as a mount that cannot be used")

    def ticks() -> list[InstigatorTick]:
        with daemon.instance as instance:
            return list(instance.get_ticks(state.instigator_origin_id, state.selector_id))

    try:
        daemon.start()
        daemon.wait_for("a tick that fails", lambda: any(t.failure_count for t in ticks()))
        home.releases.unlink()
        aside.rename(home.releases)
        # It is asked for again in the next minute.
        daemon.wait_for("the merge", lambda: daemon.runs("merge_n", Status.SUCCESS), 240)
    finally:
        daemon.kill()
    (run,) = daemon.runs("merge_n")
    assert [list(tick.run_ids) for tick in ticks()] == [[run.run_id]]
