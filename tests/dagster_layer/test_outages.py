"""What fails because storage is not there, or full, is made by itself once storage is back."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, known_experts
from tests.dagster_layer.daemon import running_daemon
from tests.dagster_layer.test_attempts import Sensor
from tests.dagster_layer.test_experts import sum_of

pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore::Warning")]

#: More attempts than what is not the surroundings' fault gets.
_ATTEMPTS = 5


@contextmanager
def gone(folder: Path) -> Iterator[None]:
    """A folder that is not there meanwhile, as one of a mount that is lost."""
    aside = folder.with_name(f".{folder.name}.aside")
    folder.rename(aside)
    try:
        yield
    finally:
        aside.rename(folder)


def failure_of(job: dg.JobDefinition, instance: dg.DagsterInstance, run: dg.RunRequest) -> str:
    """Execute what a tick requests, which fails; what it says."""
    done = job.execute_in_process(instance=instance, tags=run.tags, raise_on_error=False)
    assert not done.success
    error = next(e.step_failure_data.error for e in done.all_events if e.is_step_failure)
    return str(error and error.message)


def test_a_recipe_whose_inputs_are_gone_for_five_attempts_is_merged_by_itself_when_they_are_back(
    home: Warehouse, recipe_file: RecipeFile, instance: dg.DagsterInstance, ticker: Ticker
) -> None:
    recipes = Sensor(home, instance)
    folder = home.inbox / "expert_01"
    job = build_definitions(home).resolve_job_def("merge_n")
    for number in range(1, _ATTEMPTS + 1):
        ((request,), _) = recipes.tick()
        assert request.tags["mergepipe/attempt"] == str(number)
        with gone(folder):
            assert "expert_01 is gone" in failure_of(job, instance, request)
            requests, told = recipes.tick()
            assert not requests
            assert "n: expert_01 is gone: nothing lies at" in told
            ticker.reasons()
            assert known_experts(instance, home) == ["base"]
        requests, told = recipes.tick(pause_s=60.0)
        assert not requests
        assert f"after {number} that failed, and so on until one works; the last: exp" in told
    ((request,), _) = recipes.tick()
    assert job.execute_in_process(instance=instance, tags=request.tags).success
    assert last_release(home, "n") is not None
    assert recipes.tick() == ([], "n: the release is current")
    assert index_arrival(home, "expert_01").layers_changed == ()


def test_a_merge_whose_process_is_killed_four_times_is_made_by_the_daemon_all_the_same(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    with running_daemon(home, MERGEPIPE_RETRY_S="0.1") as daemon:

        def has_failed(times: int) -> bool:
            return len(daemon.runs(None, Status.FAILURE)) == times

        for number in range(1, 5):
            daemon.wait_for("a merge", lambda: daemon.begun() and daemon.kill_workers(), 120, 0.05)
            daemon.wait_for(f"failure {number}", partial(has_failed, number))
        daemon.wait_for("the release", lambda: last_release(home, "n"))
        assert len(daemon.runs("merge_n", Status.SUCCESS, Status.STARTED)) == 1
        told = "\n".join(daemon.skips("recipe_sensor", None))
    assert "after 4 that failed, and so on until one works; the last: " in told


def _may_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0


#: Ticks, and executes what they request, on a disk that is full until it is not.
_FULL = """
import os, sys
from pathlib import Path
import dagster as dg
from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.test_attempts import Sensor

home, full = Warehouse.at(sys.argv[1]), Path(sys.argv[1]) / ".full"
with dg.DagsterInstance.ephemeral() as instance:
    recipes = Sensor(home, instance)
    job = build_definitions(home).resolve_job_def("merge_a")
    for attempt in range(int(sys.argv[2]) + 1):
        requests, told = recipes.tick()
        assert len(requests) == 1, told
        full.unlink(missing_ok=True)
        if attempt < int(sys.argv[2]):
            free = os.statvfs(home.root)
            with full.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize - 65536)
        done = job.execute_in_process(
            instance=instance, tags=requests[0].tags, raise_on_error=False
        )
        if not done.success:
            print(recipes.tick(pause_s=60.0)[1])
    print(done.success, recipes.tick()[1])
"""


@pytest.mark.skipif(not _may_mount(), reason="mounting a small disk needs root")
def test_a_recipe_that_finds_the_disk_full_five_times_is_merged_by_itself_when_there_is_room(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    for name in ("base", "expert_00"):
        shutil.copytree(family / name, home.inbox / name)
        index_arrival(home, name)
    home.recipe_path("a").write_text(sum_of("base", "expert_00"))
    disk = tmp_path / "disk"
    disk.mkdir()
    script = [sys.executable, "-W", "ignore", "-c", _FULL, f"{disk}/w", str(_ATTEMPTS)]
    steps = (
        f"mount -t tmpfs -o size=32m none {disk}",
        f"cp -a {home.root} {disk}/w",
        shlex.join(script),
        f"cp -a {disk}/w/refs {disk}/w/releases {tmp_path}",
    )
    command = ["unshare", "-m", "sh", "-c", " && ".join(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    *told, last = done.stdout.splitlines()
    for number, said in enumerate(told, 1):
        assert f"after {number} that failed, and so on until one works; the last: The disk" in said
    assert len(told) == _ATTEMPTS
    assert last == "True a: the release is current"
    assert history(Warehouse(tmp_path), "a")


#: Has every sensor and schedule of a warehouse looked at once, and prints what each said.
_LOOK = """
import json, sys
import dagster as dg
from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.warehouse import Warehouse
repository, said = build_definitions(Warehouse.at(sys.argv[1])).get_repository_def(), {}
resources = {"mergepipe": MergePipe(home=sys.argv[1], inbox_quiet_s=0)}
with dg.DagsterInstance.local_temp(sys.argv[2]) as instance:
    given = {"instance": instance, "resources": resources, "repository_def": repository}
    for sensor in repository.sensor_defs:
        with dg.build_sensor_context(**given, sensor_name=sensor.name) as context:
            if sensor.name != "failure_sensor":
                said[sensor.name] = sensor.evaluate_tick(context).skip_message
    nightly = repository.get_schedule_def("nightly_merge_n")
    with dg.build_schedule_context(**given) as context:
        said[nightly.name] = len(nightly.evaluate_tick(context).run_requests)
print(json.dumps(said))
"""


def test_a_warehouse_that_can_only_be_read_ends_no_tick_with_an_error(
    home: Warehouse, recipe_file: RecipeFile, drop: Drop, tmp_path: Path
) -> None:
    path = home.recipe_path("n")
    path.write_text(f"{path.read_text()}schedule: '30 2 * * *'\n")
    drop("expert_02")
    home.searches.rmdir()  # as in a warehouse of another version
    folder = shlex.quote(str(home.root))
    mount = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"
    words = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    if subprocess.run([*words, mount]).returncode:
        pytest.skip("this system lets nobody mount anything")
    look = shlex.join([sys.executable, "-W", "ignore", "-c", _LOOK, str(home.root), str(tmp_path)])
    done = subprocess.run([*words, f"{mount} && {look}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    why = f"the warehouse cannot be written: {home.root}: Read-only file system"
    for name in ("inbox_sensor", "recipe_sensor"):
        assert why in said.pop(name)
    # Its run fails, and is tried again by day.
    assert said.pop("nightly_merge_n") == 1
    assert said == {
        "orphans_sensor": "0 runs under way; ended, since dead: none",
        "reload_sensor": "recipes are loaded as they are",
        "retention_sensor": "0 runs older than 30 days deleted",
        "stalled_sensor": "recipes that stand still: none",
    }
