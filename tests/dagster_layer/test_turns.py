"""Whose turn it is: one run works on a recipe, merges pass bursts, pools bind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import dagster as dg
import pytest
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import (
    QueuedRunCoordinatorDaemon,
)

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import BusyError
from mergepipe_pipeline.execution.plan_leases import lease_recipe, lease_run
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.recipes import request_or_reason
from mergepipe_pipeline.sensors.ticks import BURST_PRIORITY, make_pool_known, recipes_under_way
from mergepipe_pipeline.verbs.deploy import (
    merge_recipe,
    plan_recipe,
    release_recipe,
    snapshot_recipe,
)
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.daemon import REPOSITORY
from tests.dagster_layer.guests import origins, ours_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
_BURST = {"ops": {"index_several": {"config": {"experts": ["base"]}}}}
#: Works on recipe n until somebody ends it.
HOLD = """
import sys, time
from mergepipe_pipeline.execution.plan_leases import lease_recipe
from mergepipe_pipeline.warehouse import Warehouse
with lease_recipe(Warehouse.at(sys.argv[1]), "n"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_of_a_recipe_ends_with_the_name_of_the_first_and_harms_nothing(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    plan = plan_recipe(home, recipe_file)
    with lease_run(home, "1a2b3c4d-run"):
        merging = merge_recipe(home, "n", recipe_file.layers, EngineOptions())
        first = next(merging)
        busy = f"run 1a2b3c4d, process {os.getpid()}"
        with pytest.raises(BusyError, match=busy):
            plan_recipe(home, recipe_file)
        with pytest.raises(BusyError, match=busy):
            next(merge_recipe(home, "n", recipe_file.layers, EngineOptions()))
        with pytest.raises(BusyError, match=busy):
            snapshot_recipe(home, "n")
        with pytest.raises(BusyError, match=busy):
            release_recipe(home, recipe_file)
        assert [first.name, *(done.name for done in merging)] == list(recipe_file.layers)
    snapshot, cost = snapshot_recipe(home, "n")
    assert (snapshot.manifest.plan_id, cost.layers_executed) == (
        plan.plan_id,
        len(recipe_file.layers),
    )


def test_the_turn_of_a_killed_run_ends_with_it(home: Warehouse, recipe_file: RecipeFile) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home.root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"process {first.pid} on "):
            plan_recipe(home, recipe_file)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=20)
    with lease_recipe(home, "n"):
        pass


class Queue:
    """The run queue of an instance that has the repository's dagster.yaml."""

    def __init__(self, home: Warehouse, instance: dg.DagsterInstance) -> None:
        self.home, self.instance = home, instance
        self._definitions = build_definitions(home)
        self._coordinator = QueuedRunCoordinatorDaemon(interval_seconds=1)

    def add(self, job: str, tags: Mapping[str, str] | None = None) -> None:
        """Queue a run as the UI does: it has the tags of its job, and its pools."""
        definition = self._definitions.resolve_job_def(job)
        run = self.instance.create_run_for_job(
            definition,
            run_config=_BURST if job == "index_burst" else None,
            tags={**definition.run_tags, **(tags or {})},
            **origins(job),
        )
        self._report(run, "PIPELINE_ENQUEUED")

    def start(self) -> list[str]:
        """Start what the daemon would start next; the jobs in their order."""
        config = self.instance.get_concurrency_config()
        runs = self._coordinator._get_runs_to_dequeue(self.instance, config, None)
        for run in runs:
            self._report(run, "PIPELINE_START")
        return [run.job_name for run in runs]

    def _report(self, run: dg.DagsterRun, event: str) -> None:
        self.instance.report_dagster_event(dg.DagsterEvent(event, run.job_name), run.run_id)


@pytest.fixture
def queue(home: Warehouse, recipe_file: RecipeFile, tmp_path: Path) -> Iterator[Queue]:
    """An empty queue for recipes n, o and p."""
    for name in "op":
        shutil.copy(home.recipe_path("n"), home.recipe_path(name))
    shutil.copy(REPOSITORY / "mergepipe_pipeline" / "dagster.yaml", tmp_path)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        for pool in ("disk_read", "disk_write"):
            make_pool_known(instance, pool)
        yield Queue(home, instance)


def test_a_recipe_has_one_run_whoever_starts_it_and_each_pool_leaves_places_for_the_other(
    queue: Queue,
) -> None:
    for recipe in "nnop":
        queue.add(f"merge_{recipe}")
    for _ in range(3):
        queue.add("index_burst")
    assert recipes_under_way(ours_of(queue.home, queue.instance)) == {"n", "o", "p"}
    assert queue.start() == ["merge_n", "merge_o", "index_burst", "index_burst"]
    assert queue.start() == []


def test_merges_pass_bursts_and_nightly_runs_come_last(queue: Queue) -> None:
    resource = MergePipe(home=str(queue.home.root))
    ours = ours_of(queue.home, queue.instance)
    asked = [
        request_or_reason(resource, recipe_file, ours, (), is_time=recipe_file.name == "o")
        for recipe_file in recipe_files(queue.home)[:2]
    ]
    by_day, by_night = (r for r in asked if isinstance(r, dg.RunRequest))
    queue.add("merge_o", by_night.tags)
    queue.add("index_burst", {"dagster/priority": BURST_PRIORITY})
    queue.add("merge_n", by_day.tags)
    assert queue.start() == ["merge_n", "index_burst", "merge_o"]


def test_the_first_ticks_of_an_instance_make_a_pool_known_before_a_run_needs_it(
    home: Warehouse, recipe_file: RecipeFile, tmp_path: Path
) -> None:
    shutil.copy(REPOSITORY / "mergepipe_pipeline" / "dagster.yaml", tmp_path)
    shutil.copytree(home.inbox / "base", home.inbox / "landed")
    resource = MergePipe(home=str(home.root), inbox_quiet_s=0)
    for sensor, pool in (("inbox_sensor", "disk_read"), ("recipe_sensor", "disk_write")):
        shutil.rmtree(tmp_path / "history", ignore_errors=True)
        with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
            repository = build_definitions(home).get_repository_def()
            with dg.build_sensor_context(
                instance=instance, repository_def=repository, resources={"mergepipe": resource}
            ) as context:
                result = repository.get_sensor_def(sensor)(context)
            assert isinstance(result, dg.SensorResult)
            assert result.run_requests
            limits = {p.name: p.limit for p in instance.event_log_storage.get_pool_limits()}
            assert limits == {pool: 2}
