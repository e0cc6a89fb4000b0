"""Old runs go, with their files; what an asset shows last stays."""

from __future__ import annotations

import time
from pathlib import Path

import dagster as dg
import pytest

from sensors.retention import delete_runs

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
