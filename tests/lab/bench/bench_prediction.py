"""Claim: what `mergepipe check` says of a merge's time is within 25 % of what then happens.

    python -m tests.lab.bench.bench_prediction [--preset qwen3-0.6b | --family FOLDER] [-k 5]
        [--case ties …] [--rounds 2] [--others 0.25] [--work FOLDER]

In every round `calibrate` measures the machine; then, case by case, inputs are dropped from the
page cache, `check` predicts, and `merge` runs in a process of its own, in a warehouse that has
merged nothing. Measured is the wall time of that process from outside. `others` is how many cores
other processes kept busy meanwhile; rows with more than `--others` are shown and left out of the
summary. The ratio is predicted : measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.lab.bench.cases import (
    CASES,
    MERGEPIPE,
    Case,
    Family,
    learn,
    mergepipe,
    ours,
    write_recipe,
)
from tests.lab.bench.measure import make_cold, run
from tests.lab.bench.options import family_and_work, options

_CASES = ("linear", "task_arithmetic", "ties", "dare_ties", "ties-10%")
_WITHIN = 0.25
_PROFILE = "profile.json"


@dataclass(frozen=True, slots=True)
class Told:
    """One case of one round: the prediction (JSON of `check`), and measured seconds.

    `cpu_s` is ours; `others` are cores that were busy with something else.
    """

    case: str
    predicted: dict[str, Any]
    wall_s: float
    realised: dict[str, Any]
    cpu_s: float
    others: float

    @property
    def ratio(self) -> float:
        """Predicted seconds per measured second."""
        return float(self.predicted["total_s"]) / self.wall_s


def asked(command: Sequence[str]) -> dict[str, Any]:
    """What a command of ours says in JSON."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def calibrate(known: Path, family: Family) -> dict[str, Any]:
    """The machine as it is now, measured on a file of an expert and kept in `known`."""
    return asked([MERGEPIPE, "--home", str(known), "calibrate", str(family.experts[-1]), "--json"])


def busy_s() -> float:
    """Seconds since boot that all cores together were at work, for anyone."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measured(case: Case, family: Family, work: Path) -> Told:
    """One case: predicted cold, merged cold."""
    recipe, home, known = write_recipe(case, family, work), work / "home", work / "known"
    command = ours(case, recipe, known, home)
    home.mkdir(exist_ok=True)
    (profile,) = known.rglob(_PROFILE)
    shutil.copy(profile, home / profile.relative_to(known))
    files = family.files(based=case.based)
    make_cold(files)
    predicted = asked(mergepipe(home, "check", recipe, case))["time"]
    busy = busy_s()
    cost = run(command, cold=files, filler=work / "filler", log=work / "log")
    others = max(0.0, busy_s() - busy - cost.cpu_s) / cost.wall_s
    came = json.loads((work / "log").read_text())["time"]["realised"]
    shutil.rmtree(home)
    return Told(case.name, predicted, cost.wall_s, came, cost.cpu_s, others)


def line(t: Told) -> str:
    """One row of the table."""
    p = t.predicted
    parts = " ".join(f"{p[f'{name}_s']:6.2f}" for name in _PARTS)
    came = f"{t.realised['before_s']:6.2f} {t.realised['merging_s']:7.2f}"
    return (
        f"{t.case:<20} {p['total_s']:8.2f} {t.wall_s:8.2f} {t.ratio:6.2f}  {parts}"
        f"  {came} {t.cpu_s:6.2f} {t.others:6.2f}"
    )


_PARTS = ("start", "analysis", "planning", "merging", "reading", "computing", "writing")
_HEAD = (
    f"{'case':<20} {'told s':>8} {'took s':>8} {'ratio':>6}  "
    + " ".join(f"{name[:6]:>6}" for name in _PARTS)
    + f"  {'before':>6} {'merging':>7} {'cpu':>6} {'others':>6}"
)


def main() -> None:
    """Rows as they come, then ratios per case."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("-k", type=int, default=5, help="number of experts")
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(_CASES))
    parser.add_argument("--others", type=float, default=0.25, help="cores that may be busy")
    args = parser.parse_args()
    folder, work = family_and_work(args, args.k)
    family = Family.at(folder, args.k)
    for name in args.case:
        learn(CASES[name], write_recipe(CASES[name], family, work), work / "known")
    found: list[Told] = []
    for turn in range(args.rounds):
        rates = calibrate(work / "known", family)["engine"]
        print(f"round {turn + 1}: cold reads {rates['read_bytes_per_s'] / 1e9:.2f} GB/s")
        print(_HEAD)
        for name in args.case:
            found.append(measured(CASES[name], family, work))
            print(line(found[-1]), flush=True)
    for name in args.case:
        ratios = [t.ratio for t in found if t.case == name and t.others <= args.others]
        if not ratios:
            print(f"{name:<20} disturbed by others in every round")
            continue
        told = f"min {min(ratios):.2f} median {median(ratios):.2f} max {max(ratios):.2f}"
        print(f"{name:<20} {told}{'' if abs(median(ratios) - 1) <= _WITHIN else '  MISSED'}")


if __name__ == "__main__":
    main()
