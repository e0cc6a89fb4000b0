"""With a real daemon: what happens to arrivals when processes end that nobody asked to end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from dagster import DagsterRunStatus as Status

from assets.experts import expert_index
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.dagster_layer.daemon import running_daemon

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def test_a_cancelled_run_loses_no_expert_and_a_power_loss_leaves_no_run_started(
    home: Warehouse, drop: Drop
) -> None:
    drop("base")
    with running_daemon(home, MERGEPIPE_INBOX_RETRY_S="2") as daemon:
        (first,) = daemon.wait_for(
            "a queued run", lambda: daemon.runs("index_experts", Status.QUEUED), every_s=0.05
        )
        with daemon.instance as instance:
            assert instance.run_coordinator.cancel_run(first.run_id)
        (lost,) = daemon.wait_for("a second run, in its step", daemon.begun, every_s=0.05)
        daemon.kill()
        assert [r.run_id for r in daemon.runs(None, Status.STARTED)] == [lost]
        daemon.start()
        daemon.wait_for("its end", lambda: not daemon.runs(None, Status.STARTED), seconds=60)
        daemon.wait_for("a third run", lambda: daemon.partitions(Status.SUCCESS) == ["base"])
        *lost_ones, last = [run.status for run in daemon.runs("index_experts")]
        assert last is Status.SUCCESS
        # The queue may let the first run go in the moment in which it is cancelled.
        assert lost_ones in ([Status.CANCELED, Status.FAILURE], [Status.FAILURE])


def test_of_many_that_land_at_once_several_are_indexed_in_one_run_and_a_bad_one_waits(
    home: Warehouse, family: Path
) -> None:
    names = [f"expert_{i:02d}" for i in range(10)]
    for name in names:
        shutil.copytree(family / "expert_00", home.inbox / name)
    (home.inbox / "expert_03" / "model.safetensors").write_bytes(b"no header")
    with running_daemon(home) as daemon:
        daemon.wait_for("five runs", lambda: len(daemon.runs(None, Status.SUCCESS)) == 5)
        said = daemon.wait_for("a tick without a request", lambda: daemon.skips("inbox_sensor")[0])
        assert "expert_03: A safetensors header" in said
        assert len(daemon.runs("index_burst")) == 4
        with daemon.instance as instance:
            known = instance.get_materialized_partitions(expert_index.key)
        assert known == set(names) - {"expert_03"}
        assert len(daemon.processes()) >= 2
    assert daemon.processes() == []
