"""`python -m tests.soak [--minutes M] [--seed N] [--short]`: prints tables, exit 1 if it finds."""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mergepipe_pipeline.warehouse import Warehouse
from tests.soak.deployment import ROOT, Deployment
from tests.soak.events import EVENTS, FIRST, SHORT, Event, Scene
from tests.soak.figures import Figures
from tests.soak.judge import Judge, Row
from tests.soak.watch import Watch
from tests.soak.world import World


def main(argv: Sequence[str]) -> int:
    """Run events until the time is over; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="two events, for `make test`")
    parser.add_argument(
        "--only", default="", help="events whose name contains one of these, by comma"
    )
    parser.add_argument("--timeout", type=float, default=150.0, help="most seconds for one event")
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
    home = Warehouse(folder.resolve() / "warehouse").ensure()
    quiet_s = 2.0 if given.short else 10.0
    environment = {"MERGEPIPE_INBOX_QUIET_S": str(quiet_s)}
    deployment = Deployment(home, folder / "log", environment, given.port)
    watch = Watch(home, deployment.dagster_home)
    scene = Scene(World(home, folder / "made", given.seed), deployment, watch)
    judge, figures = Judge(scene, quiet_s, given.timeout), Figures(deployment, watch)
    rows = list[Row]()
    try:
        end = time.monotonic() + 60 * given.minutes
        for event in _order(given):
            if time.monotonic() > end:
                break
            rows += _judged(event, scene, judge)
            figures.sample()
    finally:
        deployment.stop()
    print(f"python -m tests.soak {' '.join(argv)}")
    figures.show(rows, judge.latencies)
    damaged = _verify(home)
    return int(damaged or not all(row.good for row in rows))


def _order(given: argparse.Namespace) -> list[Event]:
    """The first start, then every event once, then any."""
    if given.short:
        return [FIRST, *SHORT]
    chosen = [e for e in EVENTS if any(w in e.__name__ for w in given.only.split(","))]
    source = random.Random(given.seed)
    again = [] if given.only else source.choices(chosen, k=1000)
    return [FIRST, *source.sample(chosen, len(chosen)), *again]


def _judged(event: Event, scene: Scene, judge: Judge) -> list[Row]:
    rows = []
    judge.begin()
    for what in event(scene):
        row = judge.end(what)
        rows.append(row)
        told = "; ".join((*row.missed, *row.superfluous, *row.wrong))
        print(f"{what}: {row.seconds:.0f} s {told}", file=sys.stderr, flush=True)
        judge.begin()
    return rows


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
