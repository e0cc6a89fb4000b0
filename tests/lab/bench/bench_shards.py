"""`python -m tests.lab.bench.bench_shards FAMILY -k 5`: one merge in 1, 2, 4 steps of Dagster.

FAMILY is a folder with `base` and experts beside it. The plan is made once; then each executor
merges it in each number of shards, from inputs that are dropped from the page cache, into a
warehouse that knows no layer. Wall seconds are those of the asset `merge` in Dagster's event log:
from the moment its first step is asked for until its last one ends. An idle step is the one that
gathers, from the end of the last shard. `--executors ray` starts a head and as many workers as
there are shards, at most `--workers`, and needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import dagster as dg
from dagster import DagsterEventType as Type

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.deploy.shards import merged_layers
from mergepipe_pipeline.verbs.deploy import current_plan, plan_recipe
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench import FOLDER
from tests.lab.bench.measure import make_cold, weight_files
from tests.support.processes import environment
from tests.support.ray_cluster import ray_cluster

_METHOD = "merge_method: ties\nparameters: {density: 0.2, weight: 0.5}\ndtype: bfloat16\n"


@dataclass(frozen=True, slots=True)
class Row:
    """One merge: seconds of the asset and of each shard, and of the steps besides.

    `start_s`: from asking for a step until it begins, mean; `idle_s`: of a step that does nothing.
    `held_nbytes`: the most memory of any worker.
    """

    executor: str
    shards: int
    merge_s: float
    shards_s: tuple[float, ...]
    start_s: float
    idle_s: float
    expert_bytes_read: int
    base_bytes_read: int
    held_nbytes: int


def main() -> None:
    """Measure, and print a row for each merge."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.bench.bench_shards")
    parser.add_argument("family", type=Path)
    parser.add_argument("-k", type=int, default=5, help="experts")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--executors", nargs="+", default=["in_process", "multiprocess"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of each worker's engine")
    parser.add_argument("--home", type=Path, default=FOLDER / "shards", help="to work in; kept")
    parser.add_argument("--json", type=Path, help="append rows to this file")
    chosen = parser.parse_args()
    home = _planned(chosen.home / "warehouse", chosen.family, chosen.k)
    for _ in range(chosen.rounds):
        for executor in chosen.executors:
            for shards in chosen.shards:
                row = _measured(home, chosen.home, executor, shards, chosen)
                print(_line(row), flush=True)
                if chosen.json:
                    with chosen.json.open("a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")


def _planned(root: Path, family: Path, k: int) -> Warehouse:
    home = Warehouse.at(root).ensure()
    if not home.current_plan_path("r").exists():
        experts = sorted(p.name for p in family.glob("expert_*"))[:k]
        for name in ("base", *experts):
            register(home, family / name, name)
        models = "".join(f"- model: {name}\n" for name in experts)
        home.recipe_path("r").write_text(f"{_METHOD}base_model: base\nmodels:\n{models}")
        (recipe_file,) = recipe_files(home)
        plan_recipe(home, recipe_file)
    return home


def _measured(
    home: Warehouse, folder: Path, executor: str, shards: int, chosen: argparse.Namespace
) -> Row:
    records = home.layer_records_dir("r")
    for gone in (home.objects_dir, home.actions_dir, records):
        shutil.rmtree(gone, ignore_errors=True)
    home.ensure()
    plan = current_plan(home, "r")
    make_cold(weight_files(Path(source.root) for source in plan.sources))
    settings = {"MERGEPIPE_SHARDS": str(shards), "MERGEPIPE_EXECUTOR": executor}
    if chosen.threads:
        settings["MERGEPIPE_THREADS"] = str(chosen.threads)
    with tempfile.TemporaryDirectory(dir=folder) as temporary, ExitStack() as stack:
        if executor == "ray":
            cluster = stack.enter_context(ray_cluster(Path(temporary) / "cluster", **settings))
            for number in range(min(shards, chosen.workers)):
                cluster.add(f"worker-{number}", home.root)
            settings = cluster.settings
        dagster_home = Path(temporary) / "dagster"
        env = environment(home.root, dagster_home, **settings)
        (dagster_home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
        command = [sys.executable, "-m", "dagster", "asset", "materialize", "--select", "r/merge"]
        command += ["-m", "mergepipe_pipeline.definitions"]
        subprocess.run(command, check=True, env=env, cwd=folder, capture_output=True, timeout=1800)
        times = _times(dagster_home)
    done = merged_layers(home, "r", plan)
    shard_steps = [name for name in times if "gather" not in name]
    last = max(times[name][-1] for name in shard_steps)
    return Row(
        executor,
        shards,
        merge_s=max(t[-1] for t in times.values()) - min(t[0] for t in times.values()),
        shards_s=tuple(round(times[name][-1] - times[name][1], 2) for name in shard_steps),
        start_s=sum(t[1] - t[0] for t in times.values()) / len(times),
        idle_s=max(0.0, max(t[-1] for t in times.values()) - last),
        expert_bytes_read=sum(r.cost.expert_bytes_read for r in done),
        base_bytes_read=sum(r.cost.base_bytes_read for r in done),
        held_nbytes=max(r.held_nbytes for r in done),
    )


def _times(dagster_home: Path) -> dict[str, tuple[float, float, float]]:
    """By step: when it was asked for, when it began, and when it ended, in seconds."""
    found: dict[str, list[float]] = {}
    asked = {Type.STEP_WORKER_STARTING, Type.STEP_START, Type.STEP_SUCCESS}
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        (run,) = instance.get_runs()
        for event in instance.all_logs(run.run_id, of_type=asked):
            found.setdefault(event.step_key or "", []).append(event.timestamp)
    return {step: (t[0], t[-2], t[-1]) for step, t in sorted(found.items())}


def _line(row: Row) -> str:
    shards = " ".join(f"{s:.1f}" for s in row.shards_s)
    read = (row.expert_bytes_read + row.base_bytes_read) / 1e9
    return (
        f"{row.executor:12} {row.shards} shards: merge {row.merge_s:6.1f} s; shards {shards}; "
        f"a step begins after {row.start_s:.1f} s, an idle one takes {row.idle_s:.1f} s; "
        f"read {read:.2f} GB, a worker holds at most {row.held_nbytes / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()
