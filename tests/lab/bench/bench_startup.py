"""Claim: help takes less than 0.15 s; a merge reads after 0.9, and ends after 1.5 s if all is done.

    python -m tests.lab.bench.bench_startup [--preset qwen3-0.6b | --family FOLDER] [-k 5]
        [--rounds 3] [--work FOLDER] [--json FILE]

Nothing is cold here. The merge is of TIES without a budget; it runs once, and then again, measured,
in the same warehouse: it checks the recipe and the experts, plans, and finds all layers done. The
row "first read" is the same merge, ended when it begins to read the base's weights, "plan" the
verb.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.lab.bench.cases import CASES, MERGEPIPE, Family, mergepipe, write_recipe
from tests.lab.bench.measure import run
from tests.lab.bench.options import family_and_work, keep, options
from tests.lab.bench.rows import Needed, Row, Setting, now

#: Ends where a thread begins to read the base, while the plan is made.
_UNTIL_IT_READS = """
import os
from mergepipe_pipeline.cli.start import program
from mergepipe_pipeline.execution import planning
planning._read_ahead = lambda *_: os._exit(0)
program()
"""


def rounds(folder: Path, work: Path, k: int, number: int) -> Iterator[Row]:
    """Help and the known merge in turn; `work` is emptied at the end."""
    case, home = CASES["ties"], work / "merged"
    setting, nothing = Setting.here(folder, work), Needed(0, 0, 0)
    recipe = write_recipe(case, Family.at(folder, k), work)
    merge, plan = (mergepipe(home, verb, recipe, case) for verb in ("merge", "plan"))
    until_it_reads = [sys.executable, "-c", _UNTIL_IT_READS, *merge[1:]]
    subprocess.run(merge, check=True, capture_output=True)
    for turn in range(number):
        for name, experts, command in (
            ("help", 0, [MERGEPIPE, "--help"]),
            ("plan", k, plan),
            ("first read", k, until_it_reads),
            ("no-op", k, merge),
        ):
            load = os.getloadavg()[0]
            cost = run(command, warm_up=command, log=work / "log")
            yield Row(name, experts, "ours", turn, nothing, cost, load, now(), setting)
    shutil.rmtree(home)


def main() -> None:
    """Rows as they come, then the tables."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("-k", type=int, default=5, help="number of experts")
    args = parser.parse_args()
    keep(rounds(*family_and_work(args, args.k), args.k, args.rounds), args.json)


if __name__ == "__main__":
    main()
