"""Claim: the asynchronous search covers as much of a front as rounds do, in 0.6 of their time.

    python -m tests.lab.bench.bench_search [--seeds 5] [--evaluation-s 60] [--out FOLDER]

DTLZ2 and ZDT1 in 20 and 37 dimensions, 48 evaluations, four workers; and a DTLZ2 whose best points
lie anywhere, of which the model's terms over the whole cube tell nothing. Nothing sleeps:
a virtual clock adds lognormal evaluation times (of the stated mean, and one as the standard
deviation of logarithms) and the processor's real seconds of proposing. Then the same problems with
three active dimensions: half the evaluations with a prior that names them, against all without.

Each run keeps its row, so that a bench that was stopped goes on where it was. Two processes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Literal

import numpy as np

from mergepipe_pipeline.search.bayes import Proposer
from mergepipe_pipeline.search.pareto import Trials, hypervolume
from mergepipe_pipeline.search.prior import length_scales
from tests.lab.bench import FOLDER
from tests.lab.bench.search_methods import Evolution, Rounds
from tests.lab.bench.search_problems import Problem

_WORKERS, _INITIAL, _EVALUATIONS, _ACTIVE = 4, 8, 48, 3
#: What `smooth_scores` gives at least.
_LOWEST_SCORE = 0.05
Method = Literal["async", "sync", "nsga2", "sobol"]
Prior = Literal["none", "map"]
_METHODS: tuple[Method, ...] = ("async", "sync", "nsga2", "sobol")
_PROPOSERS = {"async": Proposer, "sync": Rounds, "nsga2": Evolution, "sobol": Proposer}
#: Priors with how many evaluations each gets.
_PRIORS: dict[Prior, int] = {"none": _EVALUATIONS, "map": _EVALUATIONS // 2}
_PROBLEMS = [(name, dims) for dims in (20, 37) for name in ("dtlz2", "zdt1")]
_PROBLEMS += [("dtlz2-any", 20)]


@dataclass(frozen=True, slots=True)
class Run:
    """One search."""

    problem: Problem
    method: Method
    prior: Prior
    evaluations: int
    seed: int

    @property
    def name(self) -> str:
        p = self.problem
        parts = (p.name, p.dims, p.active, self.method, self.prior, self.evaluations, self.seed)
        return "-".join(map(str, parts))


@dataclass(frozen=True, slots=True)
class Row:
    """Hypervolume after each evaluation; seconds of the virtual clock and of proposing."""

    hypervolumes: list[float]
    wall_s: float
    proposing_s: float


def searched(run: Run, evaluation_s: float) -> Row:
    """Search on the virtual clock: workers that are free are given points, and wait for none."""
    problem, total = run.problem, run.evaluations
    scores = np.maximum(problem.scores(run.seed), _LOWEST_SCORE)
    ask = _PROPOSERS[run.method](
        problem.dims,
        run.seed,
        total if run.method == "sobol" else _INITIAL,
        np.ones(problem.dims) if run.prior == "none" else length_scales(scores),
        np.empty((0, problem.dims)),
    )
    takes_s = evaluation_s * np.random.default_rng(run.seed).lognormal(-0.5, 1.0, _EVALUATIONS)
    trials = Trials(np.empty((0, problem.dims)), np.empty((0, 2)))
    pending: list[tuple[float, int, np.ndarray]] = []
    clock_s, proposing_s, asked, found = 0.0, 0.0, 0, list[float]()
    while len(trials) < total:
        free = min(_WORKERS - len(pending), total - asked)
        started = time.process_time()
        points = np.array([point for _, _, point in pending]).reshape(-1, problem.dims)
        new = ask.propose(trials, points, free) if free else points[:0]
        spent_s = time.process_time() - started
        clock_s, proposing_s = clock_s + spent_s, proposing_s + spent_s
        for point in new:
            heapq.heappush(pending, (clock_s + takes_s[asked], asked, point))
            asked += 1
        ended_s, _, point = heapq.heappop(pending)
        clock_s = max(clock_s, ended_s)
        trials = Trials(
            np.vstack([trials.points, point]),
            np.vstack([trials.values, problem.values(point[None], run.seed)]),
        )
        found.append(hypervolume(trials.values))
    return Row(found, clock_s, proposing_s)


def runs(seeds: int) -> list[Run]:
    """All searches, seed by seed."""
    return [
        run
        for seed in range(seeds)
        for name, dims in _PROBLEMS
        for run in (
            *(
                Run(Problem(name, dims, dims), method, "none", _EVALUATIONS, seed)
                for method in _METHODS
            ),
            *(
                Run(Problem(name, dims, _ACTIVE), "async", prior, evaluations, seed)
                for prior, evaluations in _PRIORS.items()
            ),
        )
    ]


def keep(run: Run, evaluation_s: float, folder: Path) -> str:
    """Search and keep the row, unless it is there. The run's name."""
    file = folder / f"{run.name}.json"
    if not file.exists():
        written = file.with_suffix(".part")
        written.write_text(json.dumps(asdict(searched(run, evaluation_s))))
        written.rename(file)
    return run.name


def table(seeds: int, folder: Path) -> Iterable[str]:
    """What the rows say: means, then each seed."""

    def rows(problem: Problem, method: Method, prior: Prior, evaluations: int) -> list[Row]:
        wanted = (Run(problem, method, prior, evaluations, seed) for seed in range(seeds))
        files = [folder / f"{run.name}.json" for run in wanted]
        return [Row(**json.loads(file.read_text())) for file in files if file.exists()]

    def told(found: Sequence[float]) -> str:
        return f"{mean(found):.3f} ({', '.join(f'{v:.3f}' for v in found)})" if found else "–"

    yield "| problem | front | async | sync | nsga2 | sobol | wall async : sync |"
    yield "|---|---|---|---|---|---|---|"
    for name, dims in _PROBLEMS:
        problem = Problem(name, dims, dims)
        of = {m: rows(problem, m, "none", _EVALUATIONS) for m in _METHODS}
        cells = [told([row.hypervolumes[-1] for row in of[m]]) for m in _METHODS]
        walls = [a.wall_s / s.wall_s for a, s in zip(of["async"], of["sync"], strict=False)]
        yield f"| {name} {dims} | {problem.most():.3f} | {' | '.join(cells)} | {told(walls)} |"
    yield ""
    yield "| problem, 3 active | front | none, 48 | none, 24 | map, 24 |"
    yield "|---|---|---|---|---|"
    for name, dims in _PROBLEMS:
        problem = Problem(name, dims, _ACTIVE)
        by = {p: rows(problem, "async", p, n) for p, n in _PRIORS.items()}
        half = _EVALUATIONS // 2
        cells = [
            told([row.hypervolumes[-1] for row in by["none"]]),
            *(told([row.hypervolumes[half - 1] for row in by[p]]) for p in ("none", "map")),
        ]
        yield f"| {name} {dims} | {problem.most():.3f} | {' | '.join(cells)} |"
    every = [json.loads(file.read_text()) for file in sorted(folder.glob("*-async-*.json"))]
    if every:
        points = sum(len(row["hypervolumes"]) - _INITIAL for row in every)
        yield ""
        yield f"{sum(row['proposing_s'] for row in every) / points:.2f} s to propose one point"


def _alone() -> None:
    import torch

    torch.set_num_threads(1)
    os.nice(10)


def main() -> None:
    """Run what has no row yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--evaluation-s", type=float, default=60.0, help="mean, in seconds")
    parser.add_argument("--out", type=Path, default=FOLDER / "search")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        with ProcessPoolExecutor(2, get_context("spawn"), _alone) as pool:
            jobs = [pool.submit(keep, r, args.evaluation_s, args.out) for r in runs(args.seeds)]
            for number, job in enumerate(as_completed(jobs), 1):
                print(f"{number:3}/{len(jobs)} {job.result()}", flush=True)
    print("\n".join(table(args.seeds, args.out)))


if __name__ == "__main__":
    main()
