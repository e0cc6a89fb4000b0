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
