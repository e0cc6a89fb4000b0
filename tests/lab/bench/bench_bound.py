"""Claim: no plan's error bound is violated, and sums err by no more than the margin they state.

    python -m tests.lab.bench.bench_bound [--recipes 50] [--seed 0] [--preset tiny] [--packs]

Recipes are drawn at random: method, experts, weights, densities, budget and strategy. Each is
merged in float32 under its budget and in full, and the error measured tensor by tensor. Times
nothing. Margins are four standard errors of the samples. Bounds are of exact arithmetic, so what
float32 rounds is added to them: it is as good as orthogonal to the error.

With `--packs` all experts but one are packed and plans buy levels. Then each merge must also read
what its plan says and no more than its budget, and merges in other windows and with another number
of threads must have its snapshot's id; so must plans with other block sizes that lose nothing. Of
those that do, a block is what they choose by.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench import FOLDER
from tests.lab.bench.bench_budget import STRATEGIES, distance, forget, norm, run
from tests.lab.bench.family import cached_family
from tests.lab.bench.layouts import PRESETS

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
#: Of two merges in float32, relative to the weights' norm: some roundings of half an ulp each.
_ROUNDING = 2.0**-22
#: Block sizes of plans in elements, and the engine's windows and threads.
_WAYS = (
    (4096, EngineOptions(threads=1)),
    (1 << 16, EngineOptions(threads=2, window_elems=5000)),
    (1 << 17, EngineOptions(threads=4, window_elems=1 << 18)),
)


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


def pack_all_but_one(home: Warehouse, base: Path, experts: Sequence[Path]) -> None:
    """Register a family and pack its experts; the last stays as it is."""
    register(home, base, "base")
    names = [register(home, e, e.name, "base").name for e in experts]
    pack(home, names[:-1])


def refuse_other_bits(home: Warehouse, text: str, budget: str) -> int:
    """Merge one recipe in several ways; how many. Ends the program where they do not agree."""
    parsed, ids = parse(text, name="bench", where="bench"), set()
    is_full = make_plan(home, parsed, budget=budget).estimates.error_bound == 0
    for block_elems, options in _WAYS:
        plan = make_plan(home, parsed, budget=budget, block_elems=block_elems if is_full else None)
        outcome = run_plan(home, plan, options=options, fresh=True)
        e, read = plan.estimates, outcome.summary()["expert_bytes_read"]
        if not read == e.expert_bytes_planned <= (e.budget_bytes or 0):
            raise SystemExit(f"{read} bytes read, {e.expert_bytes_planned} planned:\n{text}")
        ids.add(outcome.snapshot.snapshot_id)
    forget(home, Path(outcome.snapshot.path))
    if len(ids) > 1:
        raise SystemExit(f"{budget}: snapshots {sorted(ids)} of one recipe:\n{text}")
    return len(_WAYS)


def main() -> None:
    """One line per recipe, then how many kept their promises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--packs", action="store_true", help="plans buy levels of packs")
    parser.add_argument("--families", type=Path, default=FOLDER)
    args = parser.parse_args()
    family = cached_family(args.families, args.preset, _EXPERTS)
    experts = sorted(family.resolve().glob("expert_*"))[:_EXPERTS]
    draw, bounded, stated, within = random.Random(args.seed), 0, 0, 0
    worst, others = 0.0, 0
    with TemporaryDirectory(dir=args.families) as folder:
        home = Warehouse.at(folder).ensure()
        if args.packs:
            pack_all_but_one(home, family.resolve() / "base", experts)
        for number in range(args.recipes):
            text = drawn(draw, family.resolve() / "base", experts)
            budget, strategy = f"{draw.randint(2, 80)}%", draw.choice(STRATEGIES)
            if args.packs:
                strategy = "packs"
                others += refuse_other_bits(home, text, budget)
            full, _ = run(home, text, None, "full")
            kept = full.with_name("full")
            full.rename(kept)
            found, e = run(home, text, budget, strategy)
            error = distance(found, kept)
            if e.error_bound is not None:
                bounded += 1
                if error > math.hypot(e.error_bound, _ROUNDING * norm(kept)):
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
    if args.packs:
        print(f"{others} merges read as planned, within their budgets, and gave equal ids")


if __name__ == "__main__":
    main()
