"""Dagster's instance in PostgreSQL, on a real server: runs, events and ticks, and their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.sensors.housekeeping import delete_runs
from mergepipe_pipeline.sensors.ticks import Ours
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.postgres import programs, running_server
from tests.dagster_layer.test_retention import TAGS, old_idle_ticks_of_sensors_go, whole

pytest.importorskip("dagster_postgres", reason="needs the extra postgres")
pytestmark = [
    pytest.mark.skipif(programs() is None, reason="no PostgreSQL server is installed"),
    pytest.mark.filterwarnings("ignore::Warning"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    """An instance as the page for platform teams has it."""
    files = (
        ROOT / "mergepipe_pipeline" / "dagster.yaml",
        ROOT / "docs" / "platform" / "dagster-postgres.yaml",
    )
    (tmp_path / "dagster.yaml").write_text("\n".join(f.read_text() for f in files))
    with running_server() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
        with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
            yield instance


def counted(query: str) -> int:
    """What PostgreSQL itself answers."""
    place = programs()
    assert place is not None
    names = {"-h": "HOST", "-p": "PORT", "-d": "DB", "-U": "USERNAME"}
    given = [part for key, n in names.items() for part in (key, os.environ[f"DAGSTER_PG_{n}"])]
    command = (str(place / "psql"), *given, "-tAc", query)
    return int(subprocess.run(command, check=True, timeout=30, capture_output=True).stdout)


@contextmanager
def ticking(home: Warehouse) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Each call ticks the sensors in a process of their own; what ran."""
    process = subprocess.Popen(
        (sys.executable, "-W", "ignore", "-m", "mergepipe_pipeline.tick"), text=True,
        env={**os.environ, "MERGEPIPE_HOME": str(home.root), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as asked, process.stdout as said:

        def tick() -> list[dict[str, Any]]:
            print(file=asked, flush=True)
            return list(json.loads(said.readline()))

        try:
            yield tick
        finally:
            process.kill()
            process.wait(timeout=20)


def test_a_release_its_events_and_the_ticks_are_kept_in_postgresql_until_they_are_old(
    home: Warehouse, recipe_file: RecipeFile, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    with ticking(home) as tick:
        assert [run["success"] for run in tick()] == [True]
    assert last_release(home, "n") is not None
    released = dg.AssetKey(["n", "release"])
    assert counted("select count(*) from runs where status = 'SUCCESS'") == 1
    assert counted('select count(*) from asset_keys where asset_key = \'["n", "release"]\'') == 1
    assert instance.get_latest_materialization_event(released) is not None
    assert not list(tmp_path.rglob("*.db")), "SQLite has nothing"

    for _ in range(2):
        dg.materialize([whole], instance=instance, tags=TAGS)
    assert delete_runs(Ours(instance, TAGS), time.time() + 1) == 1
    assert counted("select count(*) from runs") == 2
    assert instance.get_latest_materialization_event(released) is not None
    old_idle_ticks_of_sensors_go(instance)
    assert counted("select count(*) from job_ticks") == 8
