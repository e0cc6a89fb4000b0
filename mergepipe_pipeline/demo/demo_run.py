"""From trained family to table: lands experts, lets Dagster work, merges under budgets, scores.

Drives the real Dagster definitions through `mergepipe_pipeline.tick` in a process of its own, since
the core does not import Dagster; merges under budgets with the same verbs as the CLI.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from mergepipe_pipeline.demo.family import (
    DEMO_DENSITY,
    DEMO_LAMBDA,
    DEMO_WEIGHT,
    Family,
    build_family,
)
from mergepipe_pipeline.demo.skills import SKILLS, score
from mergepipe_pipeline.deploy.instance import prepare_instance
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.warehouse import Warehouse

BUDGETS = ("25%", "12.5%", "6.25%", "3%")
RECIPE = "all-skills"
PAIR = "copy-and-sort"
_MARK = "demo.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Scored:
    """One row of the table; the error is relative to the full merge's update."""

    name: str
    accuracy: dict[str, float]
    expert_bytes_read: int | None = None
    relative_error: float | None = None


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo shows."""

    rows: tuple[Scored, ...]
    landings: tuple[dict[str, Any], ...]
    layers_reused: int
    layers_executed: int
    warehouse: str
    seconds: float


def run_demo(warehouse: Warehouse, say: Say) -> DemoResult:
    """Run the whole demo in `warehouse`.

    Raises MergePipeError if that is neither empty nor a demo's.
    """
    started = time.monotonic()
    warnings.filterwarnings("ignore")
    _clear(warehouse)
    family = build_family(say)
    say(
        f"family ready ({family.seconds:.0f} s of training)"
        if family.seconds
        else "family taken from the cache"
    )
    _write_recipes(warehouse)
    with _dagster(warehouse) as tick:
        landings = [_land(warehouse, "base", family.base, tick, say)]
        landings += [_land(warehouse, s, family.experts[s], tick, say) for s in SKILLS]
        rows = _score_all(warehouse, family, say)
        say(f"version 2 of {family.second_name} lands: two layers changed")
        last = _land(warehouse, family.second_name, family.second, tick, say)
    reused = [
        r
        for run in last["runs"]
        if run["job"].startswith("merge_all")
        for r in run["layers_reused"].values()
    ]
    return DemoResult(
        tuple(rows),
        (*landings, last),
        sum(reused),
        len(reused) - sum(reused),
        str(warehouse.root),
        time.monotonic() - started,
    )


def _clear(warehouse: Warehouse) -> None:
    """Start from an empty warehouse; what is not a demo's own is never touched."""
    mark = warehouse.root / _MARK
    if not mark.exists() and any(p.is_file() for p in warehouse.root.rglob("*")):
        raise MergePipeError(
            "The demo needs a warehouse of its own",
            where=str(warehouse.root),
            expected="an empty folder",
            found="a warehouse in use",
            next_step="choose another --home",
        )
    for path in list(warehouse.root.iterdir()):
        remove_tree(path)
    warehouse.ensure()
    mark.write_text('{"made_by": "mergepipe demo"}\n')


def _write_recipes(warehouse: Warehouse) -> None:
    for name, skills in ((RECIPE, SKILLS), (PAIR, ("copy", "sort"))):
        models = "\n".join(
            f"  - model: {s}\n    parameters: {{weight: {DEMO_WEIGHT}}}" for s in skills
        )
        warehouse.recipe_path(name).write_text(
            f"merge_method: ties\nbase_model: base\nmodels:\n{models}\n"
            f"parameters: {{density: {DEMO_DENSITY}, lambda: {DEMO_LAMBDA}}}\n"
        )


@contextmanager
def _dagster(warehouse: Warehouse) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """A process with the real Dagster definitions; each call lets its sensors run once."""
    prepare_instance(warehouse)
    env = {
        **os.environ,
        "MERGEPIPE_HOME": str(warehouse.root),
        "DAGSTER_HOME": str(warehouse.dagster_home),
        "MERGEPIPE_PACK": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "mergepipe_pipeline.tick"]
    with (
        (warehouse.root / "dagster.log").open("w") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        feed, answers = process.stdin, process.stdout

        def tick() -> list[dict[str, Any]]:
            feed.write("\n")
            feed.flush()
            line = answers.readline()
            if not line:
                raise MergePipeError(
                    "The Dagster process ended early", where=str(log.name), next_step="read the log"
                )
            runs: list[dict[str, Any]] = json.loads(line)
            return runs

        try:
            yield tick
        except BaseException:  # a signal too: nobody waits for what the process does then
            process.terminate()
            raise
        feed.close()


def _land(
    warehouse: Warehouse,
    name: str,
    source: Path,
    tick: Callable[[], list[dict[str, Any]]],
    say: Say,
) -> dict[str, Any]:
    """Copy a checkpoint into the inbox and let Dagster do what follows from it."""
    shutil.copytree(source, warehouse.inbox / name, dirs_exist_ok=True)
    runs = tick() + tick()
    for run in runs:
        what = run["partition"] or run["job"].removeprefix("merge_")
        reused = run["layers_reused"]
        layers = f", {sum(reused.values())} of {len(reused)} layers reused" if reused else ""
        say(
            f"  {name} landed -> {'index' if run['partition'] else 'merge'} {what}: "
            f"{'ok' if run['success'] else 'FAILED'} in {run['seconds']} s{layers}"
        )
    if not all(run["success"] for run in runs):
        raise MergePipeError(
            "A Dagster run failed",
            where=name,
            found=json.dumps(runs),
            next_step=f"read {warehouse.root / 'dagster.log'}, or open the UI: mergepipe ui",
        )
    return {"name": name, "runs": runs}


def _score_all(warehouse: Warehouse, family: Family, say: Say) -> list[Scored]:
    say("scoring base, experts and merges")
    rows = [Scored("base", score(family.base))]
    rows += [Scored(f"expert {name}", score(path)) for name, path in family.experts.items()]
    base = _tensors(family.base)
    # It holds all exact levels and not the experts themselves, which a fast disk gives sooner.
    full, whole = _merge(warehouse, "ties, exact by packs", "60%")
    rows.append(replace(whole, relative_error=0.0))
    update = _distance(full, base)
    for budget in BUDGETS:
        for source in ("packs", "blocks"):
            name = f"ties, {budget} by {source}"
            merged, row = _merge(warehouse, name, budget, no_packs=source == "blocks")
            rows.append(replace(row, relative_error=_distance(merged, full) / update))
    return rows


def _merge(
    warehouse: Warehouse, name: str, budget: str | None, *, no_packs: bool = False
) -> tuple[dict[str, Any], Scored]:
    """The merge of all skills under a budget: its weights, and a row without an error."""
    raw = load_recipe(warehouse.recipe_path(RECIPE), warehouse)
    plan = plan_in_stages(
        warehouse, raw, relative_to=warehouse.recipes, budget=budget, no_packs=no_packs
    )
    folder = Path(run_plan(warehouse, plan).snapshot.path)
    return _tensors(folder), Scored(name, score(folder), plan.estimates.expert_bytes_planned)


def _tensors(folder: Path) -> dict[str, Any]:
    return {
        name: t.double()
        for file in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(file).items()
    }


def _distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    return math.sqrt(sum(float((a[n] - b[n]).square().sum()) for n in a))
