"""A guest's merge in processes of its own: what they merge, tell and leave is as in one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterEventType as Event
from dagster_pipes import decode_param

from mergepipe_pipeline.dagster import build_recipe_defs
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.deploy.retry import Fault
from mergepipe_pipeline.errors import BusyError, MergePipeError
from mergepipe_pipeline.execution.plan_leases import lease_layers
from mergepipe_pipeline.sensors.ticks import failed_attempts
from mergepipe_pipeline.verbs.deploy import current_plan, current_snapshot, plan_recipe
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import plain
from tests.dagster_layer.guests import ours_of
from tests.dagster_layer.test_changed_inputs import replace_shard

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

LAYERS = dg.AssetKey(["n", "layers"])
#: Runs a module, and kills itself when the first layer of a merge is told of.
DIES = """
import os, runpy, signal, sys
from mergepipe_pipeline.verbs import deploy
merged = deploy.run_recorded
def dies(*args):
    for done in merged(*args):
        yield done
        os.kill(os.getpid(), signal.SIGKILL)
deploy.run_recorded = dies
runpy.run_module(sys.argv[2], run_name="__main__")
"""
#: Runs a module where no warehouse is mounted.
ELSEWHERE = """
import runpy, sys
from mergepipe_pipeline.warehouse import Warehouse
Warehouse.is_there = property(lambda warehouse: False)
runpy.run_module(sys.argv[2], run_name="__main__")
"""
#: Merges recipe n in somebody's process, by a step of its own; without a policy that tries again.
RUN = """
import sys, dagster as dg
from pathlib import Path
from mergepipe_pipeline.dagster import build_recipe_defs
home = Path(sys.argv[1])
defs = build_recipe_defs(home / "recipes", home=home, pipes=dg.PipesSubprocessClient())
defs.resolve_implicit_global_asset_job_def().execute_in_process(
    instance=dg.DagsterInstance.ephemeral(), asset_selection=[dg.AssetKey(["n", "merge"])]
)
"""


def merge(
    home: Warehouse, instance: dg.DagsterInstance, *parts: str, shards: int = 1, **running: Any
) -> dg.ExecuteInProcessResult:
    """Run parts of recipe n's chain in somebody's project, all if none is named."""
    recipe = {"n": home.recipe_path("n").read_text()}
    defs = build_recipe_defs(recipe, home=home.root, shards=shards, **running)
    return defs.resolve_job_def("mergepipe_merge_n").execute_in_process(
        instance=instance,
        asset_selection=[dg.AssetKey(["n", part]) for part in parts] or None,
        raise_on_error=False,
    )


def layers_told(instance: dg.DagsterInstance, run: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """What a run reports of each layer, but for times."""
    reported = {}
    for log in instance.all_logs(run.run_id, of_type=Event.ASSET_MATERIALIZATION):
        made = log.asset_materialization
        if made and made.asset_key == LAYERS and made.partition:
            told = {k: v for k, v in plain(made.metadata).items() if "seconds" not in k}
            reported[made.partition] = {**told, **(made.tags or {})}
    return reported


def said(instance: dg.DagsterInstance, run: dg.ExecuteInProcessResult) -> list[str]:
    """The lines that a run wrote into its log."""
    return [log.user_message for log in instance.all_logs(run.run_id) if not log.is_dagster_event]


def test_processes_merge_and_tell_what_one_does(
    home: Warehouse, recipe_file: RecipeFile, instance: dg.DagsterInstance
) -> None:
    apart = merge(home, instance, shards=2, pipes=dg.PipesSubprocessClient())
    assert apart.success
    in_children, told = current_snapshot(home, "n").snapshot_id, layers_told(instance, apart)
    assert (
        instance.get_materialized_partitions(LAYERS) == set(told) == {"embed", "00", "01", "head"}
    )
    lines = [line for line in said(instance, apart) if "merged in" in line]
    assert [line.split(":")[0] for line in lines] == [
        *("embed, 1 of 2", "layer.00, 2 of 2"),
        *("layer.01, 1 of 2", "head, 2 of 2"),
    ]
    workers = {r.step_key: r for r in apart.all_events if r.is_successful_output}
    figures = workers["n__merge.shard_001"].step_output_data.metadata
    assert figures["layers merged"].value == 2
    assert float(str(figures["peak GiB of memory"].value)) > 0
    for path in (*home.actions_dir.glob("*/*"), *home.objects_dir.glob("*/*")):
        path.unlink()
    here = merge(home, instance, shards=2)
    assert current_snapshot(home, "n").snapshot_id == in_children
    assert layers_told(instance, here) == told


def no_record(home: Warehouse) -> None:
    """Put a folder in the place of the file that records what a layer cost."""
    (home.layer_records_dir("n") / "embed.json" / "in the way").mkdir(parents=True)


@pytest.mark.parametrize(
    ("breaks", "fault"),
    [
        (lambda home: replace_shard(home, 1), Fault.SURROUNDINGS),
        (no_record, Fault.UNKNOWN),
    ],
)
def test_an_error_has_the_text_and_the_retries_that_it_has_in_one_process(
    home: Warehouse,
    recipe_file: RecipeFile,
    instance: dg.DagsterInstance,
    breaks: Callable[[Warehouse], None],
    fault: Fault,
) -> None:
    assert merge(home, instance, "plan").success
    breaks(home)
    for pipes in (None, None, dg.PipesSubprocessClient()):
        assert not merge(home, instance, "merge", pipes=pipes).success
    _, here, apart = failed_attempts(ours_of(home, instance), {})
    assert (apart.error, apart.fault) == (here.error, fault)
    assert here.fault is fault


def test_what_a_killed_process_has_finished_stays_and_sensors_try_again(
    home: Warehouse, recipe_file: RecipeFile, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    pipes = dg.PipesSubprocessClient()
    mortal = {"command": [sys.executable, str(tmp_path / "dies.py")]}
    killed = merge(home, instance, pipes=pipes, pipes_args=mortal)
    assert list(layers_told(instance, killed)) == ["embed"]
    (attempt,) = failed_attempts(ours_of(home, instance), {})
    assert attempt.error.startswith(
        "The process of a step did not start, or ended without a word. Where: shard 1 of n. "
        "Expected news of layer.00, layer.01, head, found"
    )
    assert attempt.fault is Fault.SURROUNDINGS
    again = merge(home, instance, pipes=pipes)
    assert again.success
    told = layers_told(instance, again)
    assert [told[name]["reused"] for name in ("embed", "head")] == [True, False]
    assert not list(home.leases_dir.glob("layer-*"))


def waited_for(what: Callable[[], Any]) -> Any:
    """What there is at last."""
    deadline = time.monotonic() + 120
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.fixture
def run(home: Warehouse, recipe_file: RecipeFile) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(home.root)],
        stderr=subprocess.DEVNULL,
        # Where tests run in the background, SIGINT is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    yield process
    process.kill()
    process.wait()


def steps_of(pid: int) -> list[int]:
    """The steps of its own that a process has started, and that still live."""
    words = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(w) for some in words for w in some if "mergepipe_pipeline.step" in command(w)]


def command(pid: int | str) -> str:
    """What a process runs; nothing if it has ended."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def test_a_step_waits_for_who_merges_its_layers_and_ends_with_its_run(
    home: Warehouse, recipe_file: RecipeFile, run: subprocess.Popen[bytes]
) -> None:
    plan, turn = plan_recipe(home, recipe_file), home.leases_dir / "recipe-n.lock"
    with lease_layers(home, plan.layers):
        (step,) = waited_for(lambda: steps_of(run.pid))
        waited_for(lambda: f"process {step} " in turn.read_text())
        with pytest.raises(BusyError, match=f"process {step} "):
            plan_recipe(home, recipe_file)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) != 0
        assert not command(step)
    assert not any(home.objects.lookup(layer.action_key) for layer in plan.layers)


class NoReader(dg.PipesClient):
    """A client that tells of nothing."""

    def run(self, *, context: Any, extras: Any = None, **more: Any) -> Any:
        """Start nothing."""


@pytest.mark.parametrize(
    ("running", "found"),
    [
        ({"pipes": dg.PipesSubprocessClient(), "pipes_args": {"image": "a"}}, "'image'"),
        ({"pipes": dg.PipesSubprocessClient(), "pipes_args": {"extras": {}}}, ""),
        ({"pipes": NoReader()}, "NoReader has no message reader"),
        ({"pipes_args": {"image": "a"}}, "pipes_args without pipes"),
    ],
)
def test_what_cannot_start_a_step_is_refused_when_definitions_load(
    home: Warehouse, running: Any, found: str
) -> None:
    with pytest.raises(MergePipeError, match="cannot be started") as refused:
        build_recipe_defs({}, home=home.root, **running)
    assert found in (refused.value.found or "")


def test_a_step_that_nobody_started_says_so_and_loads_no_dagster() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mergepipe_pipeline.step"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "Dagster Pipes starts this" in done.stderr
    code = "import sys, mergepipe_pipeline.step\nprint({'dagster', 'torch'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.stdout == "set()\n"


def test_a_container_without_the_warehouse_is_told_what_to_mount(
    home: Warehouse, recipe_file: RecipeFile, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    assert merge(home, instance, "plan").success
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    apart = {"command": [sys.executable, str(tmp_path / "elsewhere.py")]}
    merge(home, instance, "merge", pipes=dg.PipesSubprocessClient(), pipes_args=apart)
    (attempt,) = failed_attempts(ours_of(home, instance), {})
    assert attempt.error.startswith("The warehouse is not where a step of its own runs. Where: /")
    assert "by `pipes_args`" in attempt.error


class Engine(ThreadingHTTPServer):
    """Kubernetes' or Docker's address: it hears what is asked for, and starts nothing."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked = list[dict[str, Any]]()
        self.address = f"127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        self._answer(200, {"ApiVersion": "1.43", "Version": "24"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        self._answer(403, {"message": "nobody may start anything here"})

    def _answer(self, status: int, value: Any) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine while the test lasts."""
    with Engine() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def kubernetes(engine: Engine, folder: Path) -> dg.PipesClient:
    """A client of a cluster."""
    module = pytest.importorskip("dagster_k8s", reason="needs the extra k8s")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://{engine.address}"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "current-context": "c",
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    client: dg.PipesClient = module.PipesK8sClient(kubeconfig_file=str(folder / "kubeconfig"))
    return client


def docker(engine: Engine, folder: Path) -> dg.PipesClient:
    """A client of a daemon of Docker."""
    module = pytest.importorskip("dagster_docker", reason="needs dagster-docker")
    client: dg.PipesClient = module.PipesDockerClient()
    return client


def pod(asked: Any) -> tuple[str, list[str], dict[str, str], Any]:
    """Image, command, environment and mounts of a pod."""
    (container,) = asked["spec"]["containers"]
    env = {v["name"]: v["value"] for v in container["env"]}
    return container["image"], container["command"], env, container["volumeMounts"]


def container(asked: Any) -> tuple[str, list[str], dict[str, str], Any]:
    """Those of a container of Docker."""
    env = dict(v.split("=", 1) for v in asked["Env"])
    return asked["Image"], asked["Cmd"], env, asked["HostConfig"]["Binds"]


VOLUMES = ["/mnt/w:/mnt/w"]
MOUNTS = [{"name": "w", "mountPath": "/mnt/w"}]
SPEC = {"containers": [{"volumeMounts": MOUNTS}], "volumes": [{"name": "w", "emptyDir": {}}]}


@pytest.mark.parametrize(
    ("client", "more", "read", "mounts"),
    [
        (kubernetes, {"namespace": "merging", "base_pod_spec": SPEC}, pod, MOUNTS),
        (docker, {"container_kwargs": {"volumes": VOLUMES}}, container, VOLUMES),
    ],
)
def test_an_engine_is_asked_for_a_container_with_the_step_its_task_and_what_args_say(
    home: Warehouse,
    recipe_file: RecipeFile,
    instance: dg.DagsterInstance,
    tmp_path: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    client: Callable[[Engine, Path], dg.PipesClient],
    more: dict[str, Any],
    read: Callable[[Any], tuple[str, list[str], dict[str, str], Any]],
    mounts: Any,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"tcp://{engine.address}")
    assert merge(home, instance, "plan").success
    args = {"image": "ours/merge:1", "env": {"MERGEPIPE_THREADS": "4"}, **more}
    merge(home, instance, "merge", pipes=client(engine, tmp_path), pipes_args=args)
    image, command, env, mounted = read(engine.asked[0])
    assert (image, command, mounted) == (
        "ours/merge:1",
        ["python", "-m", "mergepipe_pipeline.step"],
        mounts,
    )
    assert env["MERGEPIPE_THREADS"] == "4"
    told = decode_param(env["DAGSTER_PIPES_CONTEXT"])["data"]["extras"]
    assert told["home"] == str(home.root)
    plan = current_plan(home, "n")
    assert (told["task"]["plan_id"], told["task"]["shard"]["layers"]) == (
        plan.plan_id,
        [layer.name for layer in plan.layers],
    )
    (attempt,) = failed_attempts(ours_of(home, instance), {})
    assert "nobody may start anything here" in attempt.error
    assert attempt.fault is Fault.SURROUNDINGS
