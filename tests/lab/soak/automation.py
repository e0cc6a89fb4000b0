"""`python -m tests.lab.soak.automation FORM…`: what starts recipes, each under the same events.

`sensor` and `condition` are ours, `eager` and `changed` are conditions of Dagster's own. A real
daemon runs each; prints a table, exit 1 if one of ours missed, repeated or invented anything.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import torch
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.daemon import ACTIVE, Daemon
from tests.lab.soak.model import BASE, Recipe
from tests.lab.soak.watch import Watch
from tests.support.family import layout, write_model

#: The forms that must say all, and those that are compared with them.
OURS, FORMS = ("sensor", "condition"), ("sensor", "condition", "eager", "changed")
RECIPES = {"r1": Recipe(("a", "b")), "r2": Recipe(("b", "c"))}
_SIZE = {"layers": 2, "hidden": 16, "vocab": 64}
#: Ticks without a run after which nothing more comes: where all is there, and where not.
_DONE, _GIVEN_UP = 2, 6
_TIMEOUT_S = 600.0
_ENVIRONMENT = {"MERGEPIPE_SENSOR_INTERVAL_S": "4", "MERGEPIPE_RETRY_S": "5"}


@dataclass
class Scene:
    """A warehouse under one form; `numbers` are those of an expert's layer 1, and of the rest."""

    daemon: Daemon
    scratch: Path
    starter: str
    numbers: dict[str, tuple[int, int]] = field(default_factory=dict)
    wanted: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    began: float = 0.0

    @property
    def home(self) -> Warehouse:
        """The warehouse."""
        return self.daemon.home

    def land(self, name: str, layer: int, rest: int) -> None:
        """Copy a version of a checkpoint."""
        tensors = {
            n: torch.full(shape, float(layer if ".layers.1." in n else rest))
            for n, shape in layout(**_SIZE)
        }
        source = write_model(self.scratch / f"{name}-{time.time_ns()}", tensors, **_SIZE)
        shutil.copytree(source, self.home.inbox / name, dirs_exist_ok=True)
        self.numbers[name] = layer, rest
        self.note()

    def land_indexed(self, name: str, layer: int, rest: int) -> None:
        """The same, and the end of its index run, in one moment."""
        self.land(name, layer, rest)
        done = index_arrival(self.home, name)
        tags = {"dagster/data_version": done.content_sha256}
        event = dg.AssetMaterialization("expert_index", partition=name, tags=tags)
        with self.daemon.instance as instance:
            instance.report_runless_asset_event(event)

    def note(self) -> None:
        """Remember what each recipe wants from now on."""
        for name, recipe in RECIPES.items():
            if {BASE, *recipe.experts} <= self.numbers.keys():
                value = self._result(recipe)
                states = self.wanted.setdefault(name, [])
                if not states or states[-1] != value:
                    states.append(value)

    def _result(self, recipe: Recipe) -> tuple[float, ...]:
        base = self.numbers[BASE]
        sums = (
            base[i] + sum(self.numbers[e][i] - base[i] for e in recipe.experts) for i in range(2)
        )
        return tuple(sorted({float(x) for x in sums}))

    def runs(self, recipe: str) -> list[dg.DagsterRun]:
        """The runs since the event began in which assets of a recipe are."""
        with self.daemon.instance as instance:
            records = instance.get_run_records(dg.RunsFilter())
        return [
            r.dagster_run
            for r in records
            if r.create_timestamp.timestamp() >= self.began and _is_of(r.dagster_run, recipe)
        ]

    def until(self, what: Callable[[], object]) -> None:
        """Wait for it, for a while."""
        end = time.monotonic() + _TIMEOUT_S / 2
        while not what() and time.monotonic() < end:
            time.sleep(0.1)

    def has_planned(self, recipe: str) -> bool:
        """Whether a run of this event has planned a recipe."""
        key = dg.AssetKey([recipe, "plan"])
        wanted = dg.AssetRecordsFilter(key, after_timestamp=self.began)
        with self.daemon.instance as instance:
            return bool(instance.fetch_materializations(wanted, limit=1).records)


def _is_of(run: dg.DagsterRun, recipe: str) -> bool:
    keys = run.asset_selection or ()
    return run.tags.get("mergepipe/recipe") == recipe or any(k.path[0] == recipe for k in keys)


def first(s: Scene) -> Iterator[str]:
    s.land(BASE, 10, 10)
    for i, name in enumerate("abc"):
        s.land(name, 20 + i, 20 + i)
    for name, recipe in RECIPES.items():
        s.home.recipe_path(name).write_text(recipe.text)
    s.daemon.start()
    yield "experts land, first start"


def changes(s: Scene) -> Iterator[str]:
    s.land("a", 31, 31)
    yield "new version of an expert of one recipe"
    s.land("b", 32, 22)
    yield "one layer of an expert of two recipes changes"
    s.land("a", 33, 33)
    s.land("c", 34, 34)
    yield "two experts change at once"


def nothing(s: Scene) -> Iterator[str]:
    s.land("b", *s.numbers["b"])
    yield "files touched, same bytes"
    s.land("d", 5, 5)
    yield "an expert lands that nobody uses"


def undone(s: Scene) -> Iterator[str]:
    before = s.numbers["a"]
    s.land("a", 41, 41)
    yield "a change"
    s.land("a", *before)
    yield "the change is undone"


def amid(s: Scene) -> Iterator[str]:
    s.land("a", 51, 51)
    s.until(lambda: s.runs("r1"))
    s.land_indexed("b", 52, 52)
    yield "another input changes between the request and the next tick"
    s.land("a", 53, 53)
    s.until(lambda: s.has_planned("r1"))
    s.land_indexed("a", 54, 54)
    s.ended["r1"] = 1  # its inputs are not those that it planned
    yield "the input changes again while its merge runs"


def failing(s: Scene) -> Iterator[str]:
    s.land("a", 61, 61)
    s.until(lambda: s.has_planned("r1"))
    s.daemon.kill_workers()
    s.ended["r1"] = 1
    yield "kill -9 of the merge"


def asleep(s: Scene) -> Iterator[str]:
    s.daemon.kill()
    s.land("c", 71, 71)
    s.daemon.start()
    yield "an expert changes while no daemon runs"


EVENTS = (first, changes, nothing, undone, amid, failing, asleep)


@dataclass(frozen=True)
class Row:
    """What a form made of one event: runs, and how many were needed."""

    event: str
    launched: int
    needed: int
    missed: tuple[str, ...]
    superfluous: int
    wrong: tuple[str, ...]


def judged(s: Scene, watch: Watch, event: str, before: dict[str, int]) -> Row:
    """Wait for quiet and compare."""
    end, silent = time.monotonic() + _TIMEOUT_S, time.time()
    while time.monotonic() < end:
        if s.daemon.runs(None, *ACTIVE):
            silent = time.time()
        names = [name for name, began, _ in watch.ticks(silent) if began >= silent]
        looks = min(names.count("mergepipe_inbox_sensor"), names.count(s.starter))
        if looks >= _GIVEN_UP or (looks >= _DONE and not _missed(s, watch)):
            break
        time.sleep(0.5)
    launched, needed, spare, wrong = 0, 0, 0, list[str]()
    for name, states in s.wanted.items():
        runs, steps = s.runs(name), len(states) - before.get(name, 0)
        failed = sum(r.status is not Status.SUCCESS for r in runs)
        launched, needed = launched + len(runs), needed + (steps > 0)
        spare += max(0, len(runs) - steps - s.ended.get(name, 0))
        found = [v for when, v in watch.released(name) if when >= s.began]
        wrong += [f"{name} released {v}" for v in found if v not in states]
        wrong += [f"{failed} runs of {name} failed"] * (failed > s.ended.get(name, 0))
    return Row(event, launched, needed, _missed(s, watch), spare, tuple(wrong))


def _missed(s: Scene, watch: Watch) -> tuple[str, ...]:
    found = {name: watch.released(name) for name in s.wanted}
    return tuple(n for n, f in found.items() if not f or f[-1][1] != s.wanted[n][-1])


def compared(form: str, folder: Path) -> list[Row]:
    """The rows of one form."""
    home = Warehouse(folder / form).ensure()
    daemon = Daemon(home, environment={**_ENVIRONMENT, "MERGEPIPE_FORM": form})
    daemon.workspace = home.root / "workspace.yaml"
    own = Path(__file__).with_name("automation_defs.py")
    load = f"load_from: [{{python_file: {{relative_path: {own}, location_name: ours}}}}]\n"
    daemon.workspace.write_text(load)
    daemon.runs()
    starter = "mergepipe_recipe_sensor" if form in OURS else "engine"
    scene, watch = Scene(daemon, folder / "made", starter), Watch(home, home.dagster_home)
    rows = list[Row]()
    try:
        for event in EVENTS:
            parts = event(scene)
            while True:
                before = {name: len(states) for name, states in scene.wanted.items()}
                scene.began = time.time()
                scene.ended.clear()
                what = next(parts, None)
                if what is None:
                    break
                rows.append(judged(scene, watch, what, before))
                print(form, rows[-1], file=sys.stderr, flush=True)
                # What it missed once is not missed again.
                for name in rows[-1].missed:
                    scene.wanted.pop(name)
    finally:
        daemon.kill()
    return rows


def main(forms: Sequence[str]) -> int:
    """Compare these forms, or all; the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no daemon is left behind
    bad = 0
    for form in forms or FORMS:
        with tempfile.TemporaryDirectory(prefix="automation-") as folder:
            rows = compared(form, Path(folder).resolve())
        print(f"{form}: {sum(r.launched for r in rows)} runs, {sum(r.needed for r in rows)} needed")
        for r in rows:
            missed = ", ".join(r.missed) or "-"
            told = (
                f"missed {missed}; superfluous {r.superfluous}; wrong {'; '.join(r.wrong) or '-'}"
            )
            print(f"  {r.event}: {r.launched} of {r.needed}; {told}")
        bad += form in OURS and any(r.missed or r.superfluous or r.wrong for r in rows)
    return int(bad > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", metavar="FORM", help=f"of {', '.join(FORMS)}: all")
    chosen = parser.parse_args().forms
    if unknown := sorted(set(chosen).difference(FORMS)):
        parser.error(f"there is no form {', '.join(unknown)}; there are {', '.join(FORMS)}")
    sys.exit(main(chosen))
