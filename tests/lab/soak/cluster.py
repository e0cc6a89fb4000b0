"""`python -m tests.lab.soak.cluster`: a merge over two workers, one of which is killed.

They are of ray, or with --celery of celery, and have homes, directories and (of ray, with
--apart) mount points of their own. With --postgres Dagster's instance is in a PostgreSQL server
that is started for it. With --multiprocess, a process of Dagster's executor is killed instead, and
the run that fails of it is followed by another. Prints who merged which layers, and exits 1 if the
ids are not those of one process, or if a layer that was finished was merged again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import dagster as dg

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.deploy.shards import merged_layers
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.execution.plan_leases import run_lives
from mergepipe_pipeline.verbs.deploy import (
    current_plan,
    current_snapshot,
    last_release,
    merge_recipe,
    plan_recipe,
    snapshot_recipe,
)
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.postgres import running_server
from tests.support.celery_cluster import celery_cluster
from tests.support.family import Size, tensors_of, write_model
from tests.support.processes import ROOT, environment, wait_for
from tests.support.ray_cluster import ray_cluster

#: Kills who works in a process.
Kill = Callable[[int], None]
_POSTGRES = ROOT / "docs" / "platform" / "dagster-postgres.yaml"
#: Layers that a worker may have finished when it is killed, and not told of.
_UNTOLD = 3
_EXPERTS = ("expert_00", "expert_01", "expert_02")


def main(argv: Sequence[str]) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.soak.cluster", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--apart", action="store_true", help="other mount points; needs root")
    parser.add_argument("--keep", type=Path, help="a folder to work in, and leave")
    parser.add_argument("--spare", action="store_true", help="kill no worker")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--multiprocess", action="store_true", help="without a cluster")
    parser.add_argument("--celery", action="store_true", help="workers of celery, over redis")
    parser.add_argument("--postgres", action="store_true", help="Dagster's instance is in it")
    chosen = parser.parse_args(argv)
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="mergepipe-cluster-"))
    try:
        server: AbstractContextManager[dict[str, str]]
        server = running_server() if chosen.postgres else nullcontext({})
        with server as variables:
            os.environ.update(variables)
            return _run(folder, chosen, variables)
    finally:
        if not chosen.keep:
            shutil.rmtree(folder)


def _run(folder: Path, chosen: argparse.Namespace, variables: dict[str, str]) -> int:
    home = small_warehouse(folder / "warehouse", chosen.layers, chosen.hidden)
    expected = _alone(home)
    started, launcher = time.monotonic(), folder / "launcher"
    settings = {"MERGEPIPE_SHARDS": str(chosen.shards), **variables}
    if chosen.multiprocess:
        settings = {"MERGEPIPE_EXECUTOR": "multiprocess", **settings}
        killed = execute(home, launcher, settings, None if chosen.spare else _kill_step)
        if killed:
            execute(home, launcher, settings)
    else:
        running = celery_cluster if chosen.celery else ray_cluster
        with running(folder / "cluster", **settings) as cluster:
            for name in "ab":
                cluster.add(name, home.root, folder / f"mount-{name}" if chosen.apart else None)
            kill = None if chosen.spare else cluster.kill_worker_of
            killed = execute(home, launcher, cluster.settings, kill)
    return _judge(home, launcher, expected, killed, time.monotonic() - started)


def execute(
    home: Warehouse, dagster_home: Path, settings: dict[str, str], kill: Kill | None = None
) -> str | None:
    """Run recipe r's chain, and kill who finishes the first layer; who that was."""
    env = environment(home.root, dagster_home, **settings)
    own = _POSTGRES.read_text() if "DAGSTER_PG_HOST" in settings else ""
    (dagster_home / "dagster.yaml").write_text(f"telemetry: {{enabled: false}}\n{own}")
    command = [sys.executable, "-m", "dagster", "job", "execute"]
    command += ["-m", "mergepipe_pipeline.definitions", "-j", "merge_r"]
    with dagster_home.with_suffix(".log").open("ab") as log:
        run = subprocess.Popen(
            command, cwd=dagster_home, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        killed = _kill_one_at_work(home, run, kill) if kill else None
        run.wait(timeout=900)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    return killed


def _kill_one_at_work(home: Warehouse, run: subprocess.Popen[bytes], kill: Kill) -> str:
    def first() -> tuple[str, str] | None:
        assert run.poll() is None, "the run ended before anything was merged"
        for path in home.layer_records_dir("r").glob("*.json"):
            return path.stem, json.loads(path.read_text())["worker"]
        return None

    layer, process = wait_for("a merged layer", first, seconds=600)
    kill(int(process.rpartition(":")[2]))
    (run_id,) = {path.name[4:40] for path in home.leases_dir.glob("run-*.json")}
    assert run_lives(home, run_id), "its run looks dead, with its process alive"
    return f"{process}, after {layer}"


def _kill_step(step: int) -> None:
    os.kill(step, signal.SIGKILL)


def small_warehouse(root: Path, layers: int, hidden: int) -> Warehouse:
    """A warehouse of a base and three experts of so many layers, indexed, and the recipe r."""
    home = Warehouse.at(root).ensure()
    size: Size = {"layers": layers, "hidden": hidden, "vocab": 512}
    for seed, name in enumerate(("base", *_EXPERTS)):
        expert = seed - 1 if seed else None
        write_model(home.inbox / name, tensors_of(0, expert, **size), shards=2, **size)
        index_arrival(home, name)
    models = "".join(f"- {{model: {m}, parameters: {{weight: 0.5}}}}\n" for m in _EXPERTS)
    text = f"merge_method: ties\nbase_model: base\nparameters: {{density: 0.3}}\nmodels:\n{models}"
    home.recipe_path("r").write_text(text)
    return home


def _alone(home: Warehouse) -> str:
    """The snapshot id of one process, of which nothing is left but the id."""
    (file,) = recipe_files(home)
    plan_recipe(home, file)
    list(merge_recipe(home, "r", file.layers, EngineOptions()))
    snapshot, _ = snapshot_recipe(home, "r")
    for gone in (home.objects_dir, home.actions_dir, home.snapshots, home.releases):
        shutil.rmtree(gone)
    home.ensure()
    return snapshot.snapshot_id


def _judge(
    home: Warehouse, dagster_home: Path, expected: str, killed: str | None, wall_s: float
) -> int:
    plan = current_plan(home, "r")
    records = dict(zip([x.name for x in plan.layers], merged_layers(home, "r", plan), strict=True))
    made = _made_by_layer(dagster_home)
    release = last_release(home, "r")
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        storage = type(instance.run_storage).__name__
    shards = len({record.shard for record in records.values()})
    print(f"{len(plan.layers)} layers in {shards} shards, {wall_s:.1f} s; killed: {killed}")
    print(f"runs are in {storage}")
    for layer, record in records.items():
        print(f"  {layer:10} shard {record.shard}  {record.worker}  merged {made.get(layer, 0)}x")
    wrong = []
    if current_snapshot(home, "r").snapshot_id != expected:
        wrong.append("the snapshot is another than that of one process")
    if release is None or release.snapshot_id != expected:
        wrong.append("the snapshot is not released")
    # A worker may die after a layer is durable, and before it can say what that has cost.
    untold = [x for x, r in records.items() if not (r.cost.layers_executed or made.get(x))]
    if len(untold) > (_UNTOLD if killed else 0):
        wrong.append(f"somebody merged layers and did not say so: {', '.join(untold)}")
    wrong += [f"{x} was reported as merged {n} times" for x, n in made.items() if n > 1]
    leftovers = [p.name for p in home.leases_dir.glob("layer-*")]
    wrong += [f"a lease is left behind: {name}" for name in leftovers]
    print("\n".join(wrong) or "as one process would: ids, layers, leases")
    return 1 if wrong else 0


def _made_by_layer(dagster_home: Path) -> dict[str, int]:
    """How often each layer was reported as merged, not reused."""
    counts: dict[str, int] = {}
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        key = dg.AssetKey(["r", "layers"])
        for record in instance.fetch_materializations(key, limit=1000).records:
            made = record.asset_materialization
            if made and made.partition and not made.metadata["reused"].value:
                name = made.partition if not made.partition.isdigit() else f"layer.{made.partition}"
                counts[name] = counts.get(name, 0) + 1
    return counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
