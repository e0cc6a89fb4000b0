"""What merges of a language model's experts keep of their skill under budgets.

    python -m tests.lab.bench_llm [--kinds short middle …] [--seeds 0 1] [--minutes 60]

Takes SmolLM2-135M-Instruct, tunes an expert of it for each of seven tasks (four of the middle kind,
three of Gemma 3 270M), merges them by nine methods with tuned scales, and the best three of these
under seven budgets, and scores all on 512 unseen items of each task. Hours on two cores; where
there is a GPU, experts learn and models answer there. Whatever was made is kept in the folder, and
a second call goes on. `--minutes` ends after what is under way then (on a GPU, all experts of a
kind), `--budgets` names those to score, or none for experts and full merges only; `--workers` merge
and score at once. Prints the tables of what is scored.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.lab.bench import FOLDER
from tests.lab.bench_llm.card import Wanted, tuned_together
from tests.lab.bench_llm.encoded import DEVICE
from tests.lab.bench_llm.kinds import KINDS, Kind
from tests.lab.bench_llm.merges import (
    BUDGETS,
    FIRST_SEED,
    METHODS,
    Family,
    judge,
    pack_all,
    ranked,
    single,
    tune,
)
from tests.lab.bench_llm.score import Scored
from tests.lab.bench_llm.table import draw, markdown
from tests.lab.bench_llm.tune import tuned

#: So many of the best methods are merged under budgets.
_KEEP = 3


def main() -> int:
    """Make, merge and score what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=FOLDER / "llm")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--budgets", nargs="*", choices=BUDGETS, default=BUDGETS)
    parser.add_argument("--minutes", type=float, default=10**6)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    kinds = [KINDS[name] for name in given.kinds]
    with (
        ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool,
        ThreadPoolExecutor(len(kinds)) as waiting,
    ):
        judged = []
        try:
            for kind in kinds:
                families = _made(given.home, kind, sorted(given.seeds), until)
                judged.append(waiting.submit(_judged, pool, families, given.budgets))
            _each(judged)
        except TimeoutError as error:
            pool.shutdown(wait=False, cancel_futures=True)
            print(f"{error}; the same command goes on")
    scored = Scored(given.home / "scores.jsonl")
    print(markdown(scored, kinds))
    if given.picture:
        draw(scored, kinds, given.picture)
    return 0


def _made(home: Path, kind: Kind, seeds: Sequence[int], until: float) -> list[Family]:
    """The families of a kind, whose experts are tuned as far as they are missing."""
    base, scored = kind.model.folder(home), Scored(home / "scores.jsonl", until)
    wanted = [
        Wanted(task, seed, home / f"{kind.name}-{seed}" / task.name)
        for seed in seeds
        for task in kind.tasks
    ]
    missing = [w for w in wanted if not w.folder.exists()]
    if missing and DEVICE.type == "cuda":
        with scored.part(f"tune {len(missing)} of {kind.name} on a GPU"):
            tuned_together(base, kind.schedule, missing)
    for each in missing if DEVICE.type == "cpu" else ():
        with scored.part(f"tune {kind.name}"):
            tuned(base, each.task, kind.schedule, each.seed, each.folder, until)
        print(f"{kind.name} {each.seed}: an expert of {each.task.name}", flush=True)
    return [
        Family(kind, seed, base, tuple(w.folder for w in wanted if w.seed == seed), home, until)
        for seed in seeds
    ]


def _judged(pool: Executor, families: Sequence[Family], budgets: Sequence[str]) -> None:
    """Score base, experts, full merges, and the best of them under budgets."""
    packs = [pool.submit(pack_all, f) for f in families]
    _each(pool.submit(single, f, e) for f in families for e in (None, *f.experts))
    _each(packs)
    first = [f for f in families if f.seed == FIRST_SEED]
    _each(pool.submit(tune, f, m, s) for f in first for m in METHODS for s in m.scales)
    best = ranked(families[0])
    _each(
        pool.submit(judge, f, m, budgets if m in best[:_KEEP] else ())
        for m in best
        for f in families
    )


def _each(futures: Iterable[Future[None]]) -> None:
    """Wait for all; raises what one raised."""
    for future in list(futures):
        future.result()


if __name__ == "__main__":
    sys.exit(main())
