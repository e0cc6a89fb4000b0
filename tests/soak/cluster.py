"""`python -m tests.soak.cluster`: a merge over two workers of dask, one of which is killed.

The workers have homes, directories and (with --apart) mount points of their own. Prints who merged
which layers, and exits 1 if the ids are not those of one process, or if a layer that was finished
was merged again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.verbs.deploy import (
    current_plan,
    current_snapshot,
    last_release,
    merge_recipe,
    plan_recipe,
    snapshot_recipe,
)
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.shards import merged_layers
from mergepipe_pipeline.warehouse import Warehouse
from tests.dask_cluster import Cluster, environment, running_cluster, wait_for
from tests.family import tensors_of, write_model

_SHARDS = 4
#: Layers that a worker may have finished when it is killed, and not told of.
_UNTOLD = 3
_EXPERTS = ("expert_00", "expert_01", "expert_02")


def main(argv: Sequence[str]) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.cluster", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--apart", action="store_true", help="other mount points; needs root")
    parser.add_argument("--keep", type=Path, help="a folder to work in, and leave")
    parser.add_argument("--spare", action="store_true", help="kill no worker")
    chosen = parser.parse_args(argv)
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="mergepipe-cluster-"))
    try:
        return _run(folder, chosen)
    finally:
        if not chosen.keep:
            shutil.rmtree(folder)


def _run(folder: Path, chosen: argparse.Namespace) -> int:
    home = _warehouse(folder / "warehouse", chosen.layers, chosen.hidden)
    expected = _alone(home)
    with running_cluster(folder / "cluster", MERGEPIPE_SHARDS=str(_SHARDS)) as cluster:
        for name in "ab":
            cluster.add(name, home.root, folder / f"mount-{name}" if chosen.apart else None)
        started = time.monotonic()
        run = _launch(home, folder / "launcher", cluster)
        try:
            killed = None if chosen.spare else _kill_one_at_work(home, cluster, run)
            run.wait(timeout=600)
        finally:
            run.kill()
        wall_s = time.monotonic() - started
        if run.returncode:
            print((folder / "launcher.log").read_text()[-4000:], cluster.log("a"), cluster.log("b"))
            return 1
    return _judge(home, folder / "launcher", expected, killed, wall_s)


def _warehouse(root: Path, layers: int, hidden: int) -> Warehouse:
    home = Warehouse.at(root).ensure()
    size = {"layers": layers, "hidden": hidden, "vocab": 512}
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
    (card,) = recipe_files(home)
    plan_recipe(home, card)
    list(merge_recipe(home, "r", card.layers, EngineOptions()))
    snapshot, _ = snapshot_recipe(home, "r")
    for gone in (home.objects_dir, home.actions_dir, home.snapshots, home.releases):
        shutil.rmtree(gone)
    home.ensure()
    return snapshot.snapshot_id


def _launch(home: Warehouse, dagster_home: Path, cluster: Cluster) -> subprocess.Popen[bytes]:
    env = environment(home.root, dagster_home, **cluster.settings)
    (dagster_home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    command = [sys.executable, "-m", "dagster", "job", "execute"]
    command += ["-m", "mergepipe_pipeline.definitions", "-j", "merge_r"]
    with dagster_home.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=dagster_home, env=env, stdout=log, stderr=log, start_new_session=True
        )


def _kill_one_at_work(home: Warehouse, cluster: Cluster, run: subprocess.Popen[bytes]) -> str:
    """Kill the worker that finishes the first layer; says who it was, and what it was at."""

    def first() -> tuple[str, str] | None:
        assert run.poll() is None, "the run ended before anything was merged"
        for path in home.layer_records_dir("r").glob("*.json"):
            return path.stem, json.loads(path.read_text())["worker"]
        return None

    layer, process = wait_for("a merged layer", first, seconds=300)
    step = int(process.rpartition(":")[2])
    worker = next(name for name in "ab" if cluster.pid(name) == _parent(step))
    cluster.kill(worker)
    return f"worker {worker}, process {process}, after {layer}"


def _parent(process: int) -> int:
    stat = Path(f"/proc/{process}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def _judge(
    home: Warehouse, dagster_home: Path, expected: str, killed: str | None, wall_s: float
) -> int:
    plan = current_plan(home, "r")
    records = dict(zip([x.name for x in plan.layers], merged_layers(home, "r", plan), strict=True))
    made = _made_by_layer(dagster_home)
    release = last_release(home, "r")
    print(f"{len(plan.layers)} layers in {_SHARDS} shards, {wall_s:.1f} s; killed: {killed}")
    for layer, record in records.items():
        print(f"  {layer:10} shard {record.shard}  {record.worker}  merged {made.get(layer, 0)}x")
    wrong = []
    if current_snapshot(home, "r").snapshot_id != expected:
        wrong.append("the snapshot is another than that of one process")
    if release is None or release.snapshot_id != expected:
        wrong.append("the snapshot is not released")
    # A worker may die after a layer is durable, and before it can say what that has cost.
    unseen = [x for x, r in records.items() if not r.cost.layers_executed]
    if len(unseen) > (_UNTOLD if killed else 0):
        wrong.append(f"somebody merged layers and did not say so: {', '.join(unseen)}")
    wrong += [f"{x} was reported as merged {n} times" for x, n in made.items() if n > 1]
    if killed and len({r.worker for r in records.values()}) < 3:
        wrong.append("nobody took the killed worker's place")
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
