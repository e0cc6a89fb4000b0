"""`python -m tests.lab.soak [--minutes M] [--seed N]`: prints tables, exit 1 if it finds anything.

Every round of events happens once, however long that takes, and then any until the time is over.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.soak.deployment import APART, DAEMON, DEV, ROOT, WORKSPACE, Deployment, Kind
from tests.lab.soak.events import FIRST, ROUNDS, SHORT, Event, Scene
from tests.lab.soak.figures import Figures
from tests.lab.soak.judge import Judge, Row
from tests.lab.soak.projects import SETTINGS, make_projects
from tests.lab.soak.watch import Watch
from tests.lab.soak.world import World

#: Seconds of quiet for a folder, as by default.
_QUIET_S = 4.0
#: Sooner than by default, so that more fits into the time: the first pause after what failed, and,
#: of one warehouse, all sensors at the pace of those that somebody waits for.
_SOONER = {"MERGEPIPE_INBOX_RETRY_S": "5", "MERGEPIPE_RETRY_S": "5"}
_ALL_SOONER = _SOONER | {"MERGEPIPE_SENSOR_INTERVAL_S": "4"}
_SHORT_QUIET_S = 1.0
_SHORT = {
    "MERGEPIPE_INBOX_RETRY_S": "1",
    "MERGEPIPE_RETRY_S": "1",
    "MERGEPIPE_SENSOR_INTERVAL_S": "1",
    "FRESHNESS_DAEMON_INTERVAL_SECONDS": "2",
}


def main(argv: Sequence[str]) -> int:
    """Run events until the time is over; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--form", choices=("alone", "components"), default="alone", help="the standing pipeline, "
        "or components in two projects of dg, with a warehouse each"
    )  # fmt: skip
    parser.add_argument("--short", action="store_true", help="one round, as in `make test-all`")
    parser.add_argument(
        "--only", default="", help="events whose name contains one of these, by comma; again and "
        "again until the time is over"
    )  # fmt: skip
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of idleness at the end")
    parser.add_argument("--experts", type=int, default=0, help="that are there from the start")
    parser.add_argument("--defaults", action="store_true", help="leave every setting as it is")
    parser.add_argument("--timeout", type=float, default=300.0, help="most seconds for one event")
    parser.add_argument("--port", type=int, default=0, help="of the UI; 0: any that is free")
    parser.add_argument("--keep", type=Path, help="leave the warehouse and the log in this folder")
    given = parser.parse_args(argv)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        return _soak(folder, given, argv)
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _soak(folder: Path, given: argparse.Namespace, argv: Sequence[str]) -> int:
    deployment, scenes = _scenes(folder.resolve(), given)
    scenes[0].world.crowd(given.experts)
    quiet_s = _SHORT_QUIET_S if given.short else _QUIET_S
    judges = [Judge(scene, quiet_s, given.timeout) for scene in scenes]
    figures, rows = Figures(deployment, scenes[0].watch), list[Row]()
    try:
        for events in _rounds(given):
            rows += _judged(events, judges)
            figures.sample()
        if given.idle and not given.short:
            figures.idle(given.idle)
    finally:
        deployment.stop()
    print(f"python -m tests.lab.soak {' '.join(argv)}\n")
    figures.show(rows, [latency for judge in judges for latency in judge.latencies])
    damaged = [_verify(scene.world.home) for scene in scenes]
    touched = len(scenes) > 1 and [*map(str, _touched(deployment.home))]
    if touched:
        print(f"the warehouse that nobody uses has {', '.join(touched)}")
    return int(any(damaged) or bool(touched) or not all(row.good for row in rows))


def _touched(home: Warehouse) -> Iterator[Path]:
    """What a warehouse holds that somebody put there."""
    for folder in (home.inbox, home.recipes, home.snapshots, home.refs_dir, home.releases):
        yield from folder.iterdir()


def _scenes(folder: Path, given: argparse.Namespace) -> tuple[Deployment, list[Scene]]:
    """One deployment, and the warehouses that it works on."""
    home, log, made = Warehouse(folder / "warehouse").ensure(), folder / "log", folder / "made"
    if given.form == "alone":
        deployment = _deployment(home, log, given)
        watch = Watch(home, deployment.dagster_home)
        return deployment, [Scene(World(home, made, given.seed), deployment, watch)]
    # The warehouse that the environment names is nobody's, and stays empty.
    workspace, guests = make_projects(folder, lambda location: deployment.reload(location))
    deployment = _deployment(home, log, given, workspace)
    (deployment.dagster_home / "dagster.yaml").write_text(SETTINGS)
    scenes = [
        Scene(
            World(g.home, made / g.home.root.name, given.seed + i, g.put, g.beside),
            deployment,
            Watch(g.home, deployment.dagster_home, g.seat),
        )
        for i, g in enumerate(guests)
    ]
    for scene in scenes:
        scene.beside += [other for other in scenes if other is not scene]
    return deployment, scenes


def _deployment(
    home: Warehouse, log: Path, given: argparse.Namespace, workspace: Path = WORKSPACE
) -> Deployment:
    if given.short:
        environment = _SHORT | {"MERGEPIPE_INBOX_QUIET_S": str(_SHORT_QUIET_S)}
        kinds: tuple[Kind, ...] = (DAEMON,)
        return Deployment(home, log, environment, kinds=kinds, quick=True, workspace=workspace)
    sooner = _ALL_SOONER if given.form == "alone" else _SOONER
    environment, kinds = {} if given.defaults else sooner, (DEV, APART)
    return Deployment(home, log, environment, given.port, kinds=kinds, workspace=workspace)


def _rounds(given: argparse.Namespace) -> Iterator[tuple[Event, ...]]:
    """The first start, then every round once, then any while there is time."""
    if given.short:
        yield (SHORT,)
        return
    end, source = time.monotonic() + 60 * given.minutes, random.Random(given.seed)
    chosen = [tuple(e for e in r if _is_meant(e, given.only)) for r in ROUNDS]
    chosen = [r for r in chosen if r]
    yield (FIRST,)
    yield from source.sample(chosen, len(chosen))
    while time.monotonic() < end:
        yield source.choice(chosen)


def _is_meant(event: Event, only: str) -> bool:
    return any(word in event.__name__ for word in only.split(","))


def _judged(events: Sequence[Event], judges: Sequence[Judge]) -> list[Row]:
    """Have the parts of several events happen side by side, and judge after each part.

    They are dealt among the warehouses.
    """
    rows, scenes = list[Row](), [judge.scene for judge in judges]
    scenes[0].world.random.shuffle(scenes)
    parts = [event(scene) for event, scene in zip(events, cycle(scenes), strict=False)]
    for judge in judges:
        judge.begin()
    while what := "; ".join(filter(None, [next(p, "") for p in parts])):
        for judge in judges[:-1]:
            judge.wait()  # the last one's is the end of all
        row = _sum(judges, [judge.end(what) for judge in judges])
        rows.append(row)
        told = "; ".join((*row.missed, *row.superfluous, *row.wrong))
        load = f"load {os.getloadavg()[0]:.0f}"
        print(f"{what}: {row.seconds:.0f} s, {load} {told}", file=sys.stderr, flush=True)
        for judge in judges:
            judge.begin()
    return rows


def _sum(judges: Sequence[Judge], rows: Sequence[Row]) -> Row:
    """One row of all warehouses; what went wrong is said with the warehouse."""

    def told(column: str) -> tuple[str, ...]:
        named = zip((j.scene.world.home.root.name for j in judges), rows, strict=True)
        return tuple(f"{name}: {what}" for name, row in named for what in getattr(row, column))

    launched, needed = sum(r.launched for r in rows), sum(r.needed for r in rows)
    failures = told("missed"), told("superfluous"), told("wrong")
    return Row(rows[0].event, launched, needed, *failures, max(r.seconds for r in rows))


def _verify(home: Warehouse) -> bool:
    """Whether `mergepipe verify --all` finds damage."""
    command = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "verify", "--all"]
    done = subprocess.run(
        [*command, "--home", str(home.root)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = (done.stdout + done.stderr).strip().splitlines()
    print(f"mergepipe verify --all: exit {done.returncode}; {told[-1] if told else ''}")
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
