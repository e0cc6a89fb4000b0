"""What merges of a language model's experts keep of their skill under budgets.

    python -m tests.lab.bench_llm [--kinds short long lora gemma] [--seeds 0 1] [--minutes 60]

Takes SmolLM2-135M-Instruct, tunes an expert of it for each of seven tasks (and for three of Gemma
3 270M), merges them by nine methods with tuned scales, and the best three of these under seven
budgets, and scores all on 512 unseen items of each task. Hours; whatever was made is kept in the
folder, and a second call goes on. `--minutes` ends after what is under way then, `--budgets` names
those to score, or none for experts and full merges only. Prints the tables of what is scored.
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
from tests.lab.bench_llm.kinds import KINDS, Kind
from tests.lab.bench_llm.merges import BUDGETS, Family, judge
from tests.lab.bench_llm.score import Scored
from tests.lab.bench_llm.table import draw, markdown
from tests.lab.bench_llm.tune import tuned


def main() -> int:
    """Make, merge and score what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=FOLDER / "llm")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--budgets", nargs="*", choices=BUDGETS, default=BUDGETS)
    parser.add_argument("--minutes", type=float, default=10**6)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    kinds = [KINDS[name] for name in given.kinds]
    scored = Scored(given.home / "scores.jsonl", until)
    try:
        for seed in given.seeds:
            for kind in kinds:
                family = made(given.home, kind, seed, scored)
                judge(packed(given.home, family, scored), family, scored, given.budgets)
    except TimeoutError as error:
        print(f"{error}; the same command goes on")
    print(markdown(scored, kinds))
    if given.picture:
        draw(scored, kinds, given.picture)
    return 0


def made(home: Path, kind: Kind, seed: int, scored: Scored) -> Family:
    """The experts of all tasks, tuned as far as they are missing."""
    base = kind.model.folder(home)
    experts = []
    for task in kind.tasks:
        folder = home / f"{kind.name}-{seed}" / task.name
        if not folder.exists():
            with scored.part(f"tune {kind.name}"):
                tuned(base, task, kind.schedule, seed, folder, scored.until)
            print(f"{kind.name} {seed}: an expert of {task.name}", flush=True)
        experts.append(folder)
    return Family(kind, seed, base, tuple(experts))


def packed(home: Path, family: Family, scored: Scored) -> Warehouse:
    """A warehouse of the family, which has packed its experts."""
    warehouse = Warehouse.at(home / "warehouses" / family.key.replace(" ", "-")).ensure()
    register(warehouse, family.base, family.base.name)
    for expert in family.experts:
        register(warehouse, expert, expert.name, family.base.name)
    with scored.part("pack"):
        pack(warehouse, [e.name for e in family.experts])
    return warehouse


if __name__ == "__main__":
    sys.exit(main())
