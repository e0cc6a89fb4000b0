"""Claim: no plan's error bound is violated, and sums err by no more than the margin they state.

    python -m tests.benchmarks.bench_bound [--recipes 50] [--seed 0] [--preset tiny]

Recipes are drawn at random: method, experts, weights, densities, budget and strategy. Each is
merged in float32 under its budget and in full, and the error measured tensor by tensor. Times
nothing. Margins are four standard errors of the sketches.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mergepipe_pipeline.warehouse import Warehouse
from tests.benchmarks import FOLDER
from tests.benchmarks.bench_budget import STRATEGIES, distance, forget, run
from tests.benchmarks.family import cached_family
from tests.benchmarks.layouts import PRESETS

METHODS = (
    "task_arithmetic",
    "ties",
    "dare_linear",
    "dare_ties",
    "breadcrumbs",
    "breadcrumbs_ties",
    "della",
)
_EXPERTS = 6


def drawn(random: random.Random, base: Path, experts: Sequence[Path]) -> str:
    """A recipe in float32."""
    method = random.choice(METHODS)
    chosen = random.sample(list(experts), random.randint(2, len(experts)))
    rows = []
    for expert in chosen:
        own = {"weight": round(random.uniform(0.1, 1.5), 3)}
        if method != "task_arithmetic":
            own["density"] = round(random.uniform(0.15, 0.95), 3)
        if method == "della":
            own["epsilon"] = 0.05
            own["density"] = min(0.9, max(0.1, own["density"]))
        rows.append(f"- {{model: {expert}, parameters: {own}}}")
    head = [f"merge_method: {method}", f"base_model: {base}", "dtype: float32"]
    return "\n".join(
        [*head, f"parameters: {{lambda: {random.uniform(0.3, 1.5):.3f}}}", "models:", *rows, ""]
    )


def main() -> None:
    """One line per recipe, then how many kept their promises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--families", type=Path, default=FOLDER)
    args = parser.parse_args()
    family = cached_family(args.families, args.preset, _EXPERTS)
    experts = sorted(family.resolve().glob("expert_*"))[:_EXPERTS]
    draw, bounded, stated, within = random.Random(args.seed), 0, 0, 0
    worst = 0.0
    with TemporaryDirectory(dir=args.families) as folder:
        home = Warehouse.at(folder).ensure()
        for number in range(args.recipes):
            text = drawn(draw, family.resolve() / "base", experts)
            budget, strategy = f"{draw.randint(2, 80)}%", draw.choice(STRATEGIES)
            full, _ = run(home, text, None, "full")
            kept = full.with_name("full")
            full.rename(kept)
            found, e = run(home, text, budget, strategy)
            error = distance(found, kept)
            if e.error_bound is not None:
                bounded += 1
                if error > e.error_bound * (1 + 1e-6):
                    raise SystemExit(f"bound {e.error_bound} violated by {error}:\n{text}")
                worst = max(worst, error / e.error_bound if e.error_bound else 0.0)
            if e.predicted_margin is not None and e.predicted_error is not None:
                stated += 1
                within += abs(error - e.predicted_error) <= e.predicted_margin + 1e-6 * error
            told = [e.predicted_error, e.predicted_margin, e.error_bound]
            predicted, margin, bound = ("–" if t is None else f"{t:.4f}" for t in told)
            print(
                f"{number + 1:3} {text.split()[1]:<17} {budget:>4} {strategy:<15} error {error:.4f}"
                f" predicted {predicted} ± {margin} bound {bound}",
                flush=True,
            )
            forget(home, found)
            shutil.rmtree(kept)
    print(f"{bounded} bounds, none violated, at most {worst:.0%} used")
    print(f"{stated} stated margins, {within} kept")


if __name__ == "__main__":
    main()
