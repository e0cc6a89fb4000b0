"""Claim: weights searched layer by layer give a better front than weights swept over whole models.

    python -m tests.lab.bench.bench_front [--out FOLDER] [--seeds 3] [--evaluations 48]

On the demo's base with two experts, one of which answers at once and one works first: shares of
right answers of both skills, and tokens until an answer ends, as greedy generation gives them.
Searches and sweeps have equal evaluations. A sweep has one weight for both experts, one mix of
them, or a grid of two weights, which is more than one global weight. Hypervolume is above -0.2 in
every objective, each scaled between the anchors of the search file.

All that is measured is kept in the folder, and a run that was killed goes on: nothing is measured
twice. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.search.pareto import front, hypervolume
from mergepipe_pipeline.verbs.search import front as front_of
from mergepipe_pipeline.verbs.search import search_of
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench import FOLDER, front_score
from tests.lab.bench.front_family import (
    AT_ONCE,
    IN_STEPS,
    LONG,
    SHORT,
    FrontFamily,
    front_family,
    write_questions,
)

#: Metric to what is 0 and what is 1 of it; the dear end is what an expert that works takes.
ANCHORS = {AT_ONCE: (0.1, 1.0), IN_STEPS: (0.2, 1.0), "tokens": ((SHORT + LONG) / 2, SHORT)}
#: The largest weight, or scale, of an expert.
MOST = 1.5
_TIES = "density: 0.5"
QUESTIONS = "questions.safetensors"
Metrics = dict[str, float]
Weights = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """What one way to look gave: metrics in order, and the mean cost of its candidates."""

    label: str
    metrics: Sequence[Metrics]
    layers_merged: float
    nbytes_read: float
    scratch_nbytes: float

    @property
    def values(self) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """The objectives, 0 to 1 between their anchors."""
        return np.array(
            [[(m[k] - a) / (b - a) for k, (a, b) in ANCHORS.items()] for m in self.metrics]
        )

    @property
    def told(self) -> str:
        """The row of a Markdown table."""
        values = self.values
        volume = hypervolume(np.maximum(values, -0.2))
        both = max(min(m[AT_ONCE], m[IN_STEPS]) for m in self.metrics)
        return (
            f"| {self.label} | {len(values)} | {volume:.3f} | {front(values).sum()} "
            f"| {100 * both:.0f} % | {self.layers_merged:.1f} "
            f"| {self.nbytes_read / 1e6:.2f} of {self.scratch_nbytes / 1e6:.2f} |"
        )


def searches(seeds: int) -> Iterator[tuple[str, str, str, str, int]]:
    """Name, merge method, weights, proposer and seed of every search."""
    for seed in range(seeds):
        yield f"layers-mix-{seed}", "task_arithmetic", "mix", "async", seed
    yield "layers-ties-mix", "ties", "mix", "async", 0
    yield "layers-each", "task_arithmetic", "each", "async", 0
    yield "layers-mix-random", "task_arithmetic", "mix", "sobol", 0


def search_text(
    family: FrontFamily, method: str, weights: str, proposer: str, seed: int, count: int
) -> str:
    """A search file over weights per layer: a mix of both experts, or a weight of each."""
    objectives = "".join(
        f"  {name}: {{direction: {'max' if a < b else 'min'}, anchors: [{a}, {b}]}}\n"
        for name, (a, b) in ANCHORS.items()
    )
    is_mix = weights == "mix"
    parameters = ([_TIES] if method == "ties" else []) + [f"lambda: {MOST if is_mix else 1.0}"]
    span = "" if is_mix else f", range: [0, {MOST}]"
    return (
        f"sources: [{family.at_once}, {family.in_steps}]\nbase_model: {family.base}\n"
        f"merge_method: {method}\nparameters: {{{', '.join(parameters)}}}\n"
        f"space: {{weights: {weights}{span}, head: search, embeddings: search}}\n"
        f"objectives:\n{objectives}"
        f"evaluate: {{command: [python, {front_score.__file__}, ../{QUESTIONS}]}}\n"
        f"evaluations: {count}\nworkers: 2\nseed: {seed}\n"
        f"initial: {count if proposer == 'sobol' else 8}\n"
    )


def searched(work: Path, name: str, text: str) -> Row:
    """The row of a search, which is begun or goes on."""
    folder = work / name
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.yml"
    if not file.exists():
        file.write_text(text)
    home = Warehouse.at(folder / "warehouse").ensure()
    command = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "--home", str(home.root)]
    subprocess.run([*command, "search", str(file)], check=True)
    return search_row(home, name)


def search_row(home: Warehouse, name: str) -> Row:
    """The row of what a search has found so far; a failure has no metrics."""
    trials = front_of(home, search_of(home, name)).trials
    costs = [t.merge for t in trials if t.merge is not None]
    return Row(
        name,
        [dict(t.metrics) for t in trials if not t.failure],
        mean(c.layers_merged for c in costs),
        mean(c.nbytes_read for c in costs),
        mean(c.scratch_nbytes for c in costs),
    )


def sweeps(count: int) -> dict[str, tuple[str, list[Weights]]]:
    """Per sweep its method, and the weights of both experts and the scale of each candidate."""
    steps, side = np.linspace(MOST / count, MOST, count), round(count**0.5)
    mixes = np.linspace(0, 1, count)
    grid = np.linspace(MOST / side, MOST, side)
    shares = np.linspace(0, 1, side)
    return {
        "task_arithmetic, one weight": ("task_arithmetic", [(1, 1, w) for w in steps]),
        "task_arithmetic, one mix": ("task_arithmetic", [(x, 1 - x, MOST) for x in mixes]),
        "task_arithmetic, grid": ("task_arithmetic", [(a, b, 1) for a in grid for b in grid]),
        "ties, one weight": ("ties", [(1, 1, w) for w in steps]),
        "ties, one mix": ("ties", [(x, 1 - x, MOST) for x in mixes]),
        "ties, grid": ("ties", [(x, 1 - x, w) for x in shares for w in grid]),
    }


def swept(work: Path, family: FrontFamily, label: str, method: str, all_: list[Weights]) -> Row:
    """The row of a sweep, of which a file keeps what is measured."""
    home = Warehouse.at(work / "sweeps" / label.replace(", ", "-").replace(" ", "-")).ensure()
    kept = home.root / "measured.jsonl"
    found = list(map(json.loads, kept.read_text().splitlines())) if kept.exists() else []
    with kept.open("a") as out:
        for weights in all_[len(found) :]:
            found.append(_measured(home, family, work / QUESTIONS, method, weights))
            out.write(json.dumps(found[-1]) + "\n")
            out.flush()
    layers, nbytes = (mean(f[k] for f in found) for k in ("layers", "nbytes"))
    return Row(
        label, [f["metrics"] for f in found], layers, nbytes, max(f["nbytes"] for f in found)
    )


def _measured(
    home: Warehouse, family: FrontFamily, questions: Path, method: str, weights: Weights
) -> dict[str, float | Metrics]:
    """Merge and measure one candidate of a sweep."""
    *each, scale = map(float, weights)
    models = "".join(
        f"  - {{model: {path}, parameters: {{weight: {w}}}}}\n"
        for path, w in zip((family.at_once, family.in_steps), each, strict=True)
    )
    parameters = f"lambda: {scale}" + (f", {_TIES}" if method == "ties" else "")
    text = (
        f"merge_method: {method}\nbase_model: {family.base}\nmodels:\n{models}"
        f"parameters: {{{parameters}}}\n"
    )
    plan = make_plan(home, parse(text, name="sweep", where="sweep"), relative_to=home.root)
    done = run_plan(home, plan)
    cost = done.realised
    return {
        "metrics": front_score.score(questions, Path(done.snapshot.path)),
        "layers": cost.layers_executed,
        "nbytes": cost.expert_bytes_read + cost.base_bytes_read,
    }


HEADER = (
    "| candidates | evaluations | hypervolume | on the front | both skills at least "
    "| layers merged | MB read, of a merge from scratch |\n|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Sweep, search, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "front")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=48)
    args = parser.parse_args()
    work: Path = args.out.resolve()
    work.mkdir(parents=True, exist_ok=True)
    family = front_family(work)
    write_questions(work / QUESTIONS)
    print(HEADER)
    for label, (method, all_) in sweeps(args.evaluations).items():
        print(swept(work, family, label, method, all_).told, flush=True)
    for name, method, weights, proposer, seed in searches(args.seeds):
        text = search_text(family, method, weights, proposer, seed, args.evaluations)
        print(searched(work, name, text).told, flush=True)


if __name__ == "__main__":
    main()
