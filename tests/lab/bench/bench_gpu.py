"""Claim: a merge with `--device cuda` gives the snapshot of the CPU; and how long either takes.

    python -m tests.lab.bench.bench_gpu [--preset qwen3-0.6b | --family FOLDER] [-k 5]
        [--case ties …] [--warm] [--rounds 3] [--work FOLDER] [--json FILE]

In every round and case both run in turn on the same files, in warehouses that know the experts and
have merged nothing; the inputs are dropped from the page cache before each, or with `--warm` stay
there, so that the disk hides no arithmetic. Both end in one snapshot id, or the benchmark fails.
Without a GPU it says so and ends.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.lab.bench.cases import CASES, Case, Family, learn, ours, write_recipe
from tests.lab.bench.measure import run
from tests.lab.bench.options import family_and_work, options
from tests.lab.bench.report import line, ratios, spread
from tests.lab.bench.rows import Row, Setting, append, now

DEVICES = ("cpu", "cuda")


def rounds(
    family: Family, work: Path, cases: Sequence[Case], number: int, *, warm: bool
) -> Iterator[Row]:
    """All measurements, as they are done. Raises SystemExit if the devices' snapshots differ."""
    known, home = work / "known", work / "merged"
    setting = Setting.here(family.base.parent, work)
    for case in cases:
        recipe = write_recipe(case, family, work)
        needed = learn(case, recipe, known)
        found = set()
        for turn in range(number):
            for device in DEVICES if turn % 2 == 0 else DEVICES[::-1]:
                command = [*ours(case, recipe, known, home), "--device", device]
                load = os.getloadavg()[0]
                cold = [] if warm else family.files(based=case.based)
                cost = run(command, cold=cold, log=work / "log")
                found.add(json.loads((work / "log").read_text())["snapshot_id"])
                yield Row(
                    case.name, len(family.experts), device, turn, needed, cost, load, now(), setting
                )
                shutil.rmtree(home)
        if len(found) > 1:
            raise SystemExit(f"{case.name}: the snapshots of {DEVICES} differ: {sorted(found)}")


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Per case cuda's time over the CPU's, min / median / max over rounds."""
    for case in dict.fromkeys(row.case for row in rows):
        cpu, cuda = ([r for r in rows if (r.case, r.who) == (case, who)] for who in DEVICES)
        yield f"{case} K={cpu[0].k}: cuda / cpu {spread(ratios(cuda, cpu))}, the same snapshot"


def main() -> None:
    """Rows as they come, then the ratios."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("-k", type=int, default=5, help="number of experts")
    parser.add_argument("--case", choices=CASES, nargs="+", default=["ties", "dare_ties", "linear"])
    parser.add_argument("--warm", action="store_true", help="leave inputs in the page cache")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU that torch can use here: nothing is measured.")
        return
    folder, work = family_and_work(args, args.k)
    cases = [CASES[name] for name in args.case]
    print(f"on {torch.cuda.get_device_name()}")
    rows = []
    for row in rounds(Family.at(folder, args.k), work, cases, args.rounds, warm=args.warm):
        rows.append(row)
        if args.json:
            append(args.json, row)
        print(line(row), flush=True)
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
