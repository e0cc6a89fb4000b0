"""What merges of a language model's experts keep of their skill under budgets.

    python -m tests.lab.bench_llm [--kinds short long] [--seeds 0 1] [--minutes 60]

Takes SmolLM2-135M-Instruct, tunes an expert of it for each of seven tasks, merges them by nine
methods with tuned scales, and the best three of these under seven budgets, and scores all on 512
unseen items of each task. Hours; whatever was made is kept in the folder, and a second call goes
on. `--minutes` ends after what is under way then. Prints the tables of what is scored.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench import FOLDER
from tests.lab.bench_llm.merges import Family, judge
from tests.lab.bench_llm.pretrained import pretrained
from tests.lab.bench_llm.score import Scored
from tests.lab.bench_llm.table import draw, markdown
from tests.lab.bench_llm.tasks import TASKS
from tests.lab.bench_llm.tune import Kind, tuned

TITLES = {"short": "tuned for some minutes", "long": "tuned until the loss is flat"}


def main() -> int:
    """Make, merge and score what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=FOLDER / "llm")
    parser.add_argument("--kinds", nargs="*", choices=TITLES, default=["short", "long"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--minutes", type=float, default=10**6)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    scored = Scored(given.home / "scores.jsonl", until)
    try:
        for seed in given.seeds:
            for kind in given.kinds:
                family = made(given.home, kind, seed, until)
                judge(packed(given.home, family), family, scored)
    except TimeoutError as error:
        print(f"{error}; the same command goes on")
    print(markdown(scored, given.kinds))
    if given.picture:
        draw(scored, {kind: TITLES[kind] for kind in given.kinds}, given.picture)
    return 0


def made(home: Path, kind: Kind, seed: int, until: float) -> Family:
    """The experts of all tasks, tuned as far as they are missing."""
    base = pretrained(home)
    experts = []
    for task in TASKS:
        folder = home / f"{kind}-{seed}" / task.name
        began = time.monotonic()
        if not folder.exists():
            tuned(base, task, kind, seed, folder, until=until)
            print(f"{kind} {seed} {task.name}: {time.monotonic() - began:.0f} s", flush=True)
        experts.append(folder)
    return Family(f"{kind} {seed}", base, tuple(experts))


def packed(home: Path, family: Family) -> Warehouse:
    """A warehouse of the family, which has packed its experts."""
    warehouse = Warehouse.at(home / "warehouses" / family.key.replace(" ", "-")).ensure()
    register(warehouse, family.base, family.base.name)
    for expert in family.experts:
        register(warehouse, expert, expert.name, family.base.name)
    pack(warehouse, [e.name for e in family.experts])
    return warehouse


if __name__ == "__main__":
    sys.exit(main())
