"""Old runs of ours go, with their files, and idle ticks; what an asset shows last stays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import RemoteInstigatorOrigin
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    ScheduleInstigatorData,
    TickData,
    TickStatus,
)

from mergepipe_pipeline.resources import WAREHOUSE_TAG
from mergepipe_pipeline.sensors.housekeeping import delete_idle_ticks, delete_runs
from mergepipe_pipeline.sensors.ticks import Ours
from tests.dagster_layer.guests import repository_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
#: Those of our runs.
TAGS = {WAREHOUSE_TAG: "0123456789ab"}
_PARTS = dg.DynamicPartitionsDefinition(name="parts")


@dg.asset(partitions_def=_PARTS)
def made() -> None:
    """One partition of something."""


@dg.asset
def whole() -> None:
    """Something without partitions."""


@dg.asset_check(asset=whole)
def sound() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


def test_old_runs_are_deleted_but_not_what_an_asset_shows_last(tmp_path: Path) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        instance.add_dynamic_partitions("parts", ["a", "b"])
        ours = Ours(instance, TAGS)
        runs = [
            dg.materialize([made], instance=instance, partition_key=part, tags=TAGS).run_id
            for part in ("a", "b", "a")
        ]
        runs += [
            dg.materialize([whole, sound], instance=instance, tags=TAGS).run_id for _ in range(2)
        ]
        files = tmp_path / "history" / "runs"
        assert all((files / f"{run_id}.db").exists() for run_id in runs)

        assert delete_runs(ours, time.time() - 3600) == 0
        assert delete_runs(ours, time.time() + 1) == 2

        left = set(instance.get_run_ids())
        assert left == {runs[1], runs[2], runs[4]}
        assert {p.stem for p in files.glob("*-*.db")} == left
        assert instance.get_materialized_partitions(made.key) == {"a", "b"}
        assert instance.get_latest_materialization_event(whole.key) is not None


def test_partitions_are_asked_for_of_partitioned_assets_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        instance.add_dynamic_partitions("parts", ["a"])
        ours = Ours(instance, TAGS)
        dg.materialize([made], instance=instance, partition_key="a", tags=TAGS)
        dg.materialize([whole], instance=instance, tags=TAGS)
        storage, asked = instance.event_log_storage, list[dg.AssetKey]()
        real = storage.get_latest_storage_id_by_partition

        def asking(key: dg.AssetKey, *args: Any) -> Any:
            asked.append(key)
            return real(key, *args)

        monkeypatch.setattr(storage, "get_latest_storage_id_by_partition", asking)
        assert delete_runs(ours, time.time() + 1) == 0
        assert asked == [made.key]


def test_old_ticks_of_sensors_that_asked_for_nothing_are_deleted(tmp_path: Path) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        old_idle_ticks_of_sensors_go(instance)


def old_idle_ticks_of_sensors_go(instance: dg.DagsterInstance) -> None:
    """Ticks of sensors and a schedule, old and new; of these the old idle ones of ours go."""
    sensor, schedule = InstigatorType.SENSOR, InstigatorType.SCHEDULE
    ours = Ours(instance, TAGS, repository_of("here").get_label())
    states = {}
    for place, name, kind in (
        ("here", "inbox_sensor", sensor),
        ("here", "a_sensor_of_theirs", sensor),
        ("there", "inbox_sensor", sensor),
        ("here", "nightly_merge_n", schedule),
    ):
        data = ScheduleInstigatorData("0 2 * * *") if kind is schedule else None
        origin = RemoteInstigatorOrigin(repository_of(place), name)
        state = InstigatorState(origin, kind, InstigatorStatus.RUNNING, data)
        states[place, name] = instance.add_instigator_state(state)

    def tick(state: InstigatorState, status: TickStatus, at: float) -> None:
        name, kind = state.instigator_name, state.instigator_type
        ids = state.instigator_origin_id, name, kind, status, at
        instance.create_tick(TickData(*ids, run_ids=[], selector_id=state.selector_id))

    for state in states.values():
        tick(state, TickStatus.SKIPPED, 100.0)
        tick(state, TickStatus.SKIPPED, 300.0)
    mine = states.pop(("here", "inbox_sensor"))
    tick(mine, TickStatus.SUCCESS, 100.0)
    delete_idle_ticks(ours, 200.0)

    def left(state: InstigatorState) -> list[tuple[float, TickStatus]]:
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id)
        return [(t.timestamp, t.status) for t in ticks]

    assert left(mine) == [(300.0, TickStatus.SKIPPED), (100.0, TickStatus.SUCCESS)]
    assert [len(left(state)) for state in states.values()] == [2, 2, 2]
