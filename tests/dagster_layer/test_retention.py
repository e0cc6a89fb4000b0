"""Old runs go, with their files, and idle ticks; what an asset shows last stays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    ScheduleInstigatorData,
    TickData,
    TickStatus,
)

from mergepipe_pipeline.sensors.retention import delete_idle_ticks, delete_runs

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
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
        runs = [
            dg.materialize([made], instance=instance, partition_key=part).run_id
            for part in ("a", "b", "a")
        ]
        runs += [dg.materialize([whole, sound], instance=instance).run_id for _ in range(2)]
        files = tmp_path / "history" / "runs"
        assert all((files / f"{run_id}.db").exists() for run_id in runs)

        assert delete_runs(instance, time.time() - 3600) == 0
        assert delete_runs(instance, time.time() + 1) == 2

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
        dg.materialize([made], instance=instance, partition_key="a")
        dg.materialize([whole], instance=instance)
        storage, asked = instance.event_log_storage, list[dg.AssetKey]()
        real = storage.get_latest_storage_id_by_partition

        def asking(key: dg.AssetKey, *args: Any) -> Any:
            asked.append(key)
            return real(key, *args)

        monkeypatch.setattr(storage, "get_latest_storage_id_by_partition", asking)
        assert delete_runs(instance, time.time() + 1) == 0
        assert asked == [made.key]


def test_old_ticks_of_sensors_that_asked_for_nothing_are_deleted(tmp_path: Path) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        old_idle_ticks_of_sensors_go(instance)


def old_idle_ticks_of_sensors_go(instance: dg.DagsterInstance) -> None:
    """Ticks of a sensor and a schedule, old and new; of these the old idle one goes."""
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "__repository__")
    states = {}
    nightly = ScheduleInstigatorData("0 2 * * *")
    for kind, data in ((InstigatorType.SENSOR, None), (InstigatorType.SCHEDULE, nightly)):
        origin = RemoteInstigatorOrigin(repository, kind.value)
        states[kind] = InstigatorState(origin, kind, InstigatorStatus.RUNNING, data)
        instance.add_instigator_state(states[kind])

    def tick(kind: InstigatorType, status: TickStatus, at: float) -> None:
        state = states[kind]
        ids = state.instigator_origin_id, kind.value, kind, status, at
        instance.create_tick(TickData(*ids, run_ids=[], selector_id=state.selector_id))

    for kind in states:
        tick(kind, TickStatus.SKIPPED, 100.0)
        tick(kind, TickStatus.SKIPPED, 300.0)
    tick(InstigatorType.SENSOR, TickStatus.SUCCESS, 100.0)
    delete_idle_ticks(instance, 200.0)

    def left(kind: InstigatorType) -> list[tuple[float, TickStatus]]:
        state = states[kind]
        ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id)
        return [(t.timestamp, t.status) for t in ticks]

    assert left(InstigatorType.SENSOR) == [
        (300.0, TickStatus.SKIPPED),
        (100.0, TickStatus.SUCCESS),
    ]
    assert len(left(InstigatorType.SCHEDULE)) == 2
