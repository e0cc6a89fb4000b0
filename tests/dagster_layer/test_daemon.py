"""With a real daemon: what happens to arrivals when processes end that nobody asked to end."""

from __future__ import annotations

import pytest
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.dagster_layer.daemon import running_daemon

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def test_the_daemon_indexes_what_lands_and_none_of_its_processes_outlives_it(
    home: Warehouse, drop: Drop
) -> None:
    drop("base")
    with running_daemon(home) as daemon:
        daemon.wait_for("the index run", lambda: daemon.partitions(Status.SUCCESS))
        assert daemon.partitions() == ["base"]
        assert len(daemon.processes()) >= 2
    assert daemon.processes() == []


def test_a_power_loss_leaves_no_run_started(home: Warehouse, drop: Drop) -> None:
    drop("base")
    with running_daemon(home) as daemon:
        (lost,) = daemon.wait_for("a run in its step", daemon.begun, every_s=0.05)
        daemon.kill()
        assert [r.run_id for r in daemon.runs(None, Status.STARTED)] == [lost]
        daemon.start()
        daemon.wait_for("its end", lambda: not daemon.runs(None, Status.STARTED), seconds=60)
        assert daemon.runs()[0].status is Status.FAILURE
