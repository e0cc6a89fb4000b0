"""Claim: for the same bytes magnitude ends nearest to the full merge.

    python -m tests.lab.bench.bench_budget FAMILY [--experts 10] [--home FOLDER]
    python -m tests.lab.bench.bench_budget demo

FAMILY is a folder with `base` and experts beside it; `demo` the trained family of `make demo`,
whose skills are scored too (the mean share of right answers). Every cell is a real merge in
float32, compared tensor by tensor with the merge without a budget: ‖W_b − W_full‖ /
‖W_full − W_base‖, and behind it what the plan had predicted.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from mergepipe_pipeline.domain.plan import Estimates
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench import FOLDER
from tests.lab.bench.baselines import BASELINES, baselines

BUDGETS = ("2%", "5%", "10%", "25%", "50%")
STRATEGIES = ("magnitude", *BASELINES)
METHODS = {"task_arithmetic": "weight: 0.3", "ties": "weight: 1.0, density: 0.2"}


def recipe_text(method: str, base: Path, experts: list[Path]) -> str:
    """A recipe of all experts with float32 output, so that no cast hides a difference."""
    rows = "".join(f"- {{model: {e}, parameters: {{{METHODS[method]}}}}}\n" for e in experts)
    head = f"merge_method: {method}\nbase_model: {base}\ndtype: float32\nout_dtype: float32\n"
    return f"{head}models:\n{rows}"


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and float32 values of every tensor, one at a time."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in sorted(opened.keys()):
                yield name, opened.get_tensor(name).float()


def distance(a: Path, b: Path) -> float:
    """‖A − B‖₂ over all tensors of two model folders with equal tensors."""
    total = 0.0
    other = dict(_files(b))
    for name, value in tensors(a):
        with safe_open(other[name], "pt") as opened:
            total += float((value - opened.get_tensor(name).float()).double().square().sum())
    return math.sqrt(total)


def norm(folder: Path) -> float:
    """‖W‖₂ over all tensors of a model folder."""
    return math.sqrt(sum(float(value.double().square().sum()) for _, value in tensors(folder)))


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names: list[str] = opened.keys()
            yield from ((name, file) for name in names)


def run(home: Warehouse, text: str, budget: str | None, strategy: str) -> tuple[Path, Estimates]:
    """The snapshot's folder and the plan's promises."""
    raw = parse(text, name="bench", where="bench")
    with baselines():
        plan = make_plan(home, raw, budget=budget, strategy=strategy)
    return Path(run_plan(home, plan).snapshot.path), plan.estimates


def forget(home: Warehouse, snapshot: Path) -> None:
    """Free the disk: the snapshot, the layers it shares with no other, and their index."""
    shutil.rmtree(snapshot)
    for folder in (home.objects_dir, home.actions_dir):
        shutil.rmtree(folder)
    home.ensure()


def untried(snapshot: Path) -> str:
    """Nothing to say of a model that has no task."""
    return ""


def skill(snapshot: Path) -> str:
    """The mean share of right answers over the demo's skills."""
    from mergepipe_pipeline.demo.skills import score

    shares = score(snapshot)
    return f", {sum(shares.values()) / len(shares):.0%} right"


def table(
    home: Warehouse,
    method: str,
    base: Path,
    experts: list[Path],
    strategies: Sequence[str],
    tried: Callable[[Path], str],
) -> None:
    """Print strategy × budget for one method; `tried` says how good a snapshot is."""
    text = recipe_text(method, base, experts)
    full, promised = run(home, text, None, "full")
    kept = full.with_name("full")
    full.rename(kept)
    update = distance(kept, base)
    print(f"{method}, {len(experts)} experts, ‖W_full − W_base‖ {update:.4g}", end="")
    print(f" (predicted {promised.update_norm or 0:.4g}){tried(kept)}")
    print(f"{'budget':>8}" + "".join(f"  {s:>36}" for s in strategies))
    for budget in BUDGETS:
        cells = []
        for strategy in strategies:
            found, e = run(home, text, budget, strategy)
            error = distance(found, kept)
            assert e.error_bound is None or error <= e.error_bound * (1 + 1e-6), "bound violated"
            cells.append(
                f"{error / update:.4f} (predicted {(e.predicted_error or 0) / update:.4f})"
                f"{tried(found)}"
            )
            forget(home, found)
        print(f"{budget:>8}" + "".join(f"  {c:>36}" for c in cells), flush=True)
    shutil.rmtree(kept)


def main() -> None:
    """One table per method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("--experts", type=int, default=10)
    parser.add_argument("--home", default=FOLDER / "budget")
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--strategy", choices=STRATEGIES, action="append")
    args = parser.parse_args()
    strategies = args.strategy or STRATEGIES
    home = Warehouse.at(args.home).ensure()
    tried: Callable[[Path], str] = untried
    if args.family == "demo":
        from mergepipe_pipeline.demo.family import build_family

        family = build_family(print)
        base, experts, tried = family.base, list(family.experts.values()), skill
    else:
        folder = Path(args.family).resolve()
        base = folder / "base"
        experts = sorted(p for p in folder.iterdir() if p.is_dir() and p != base)
    for method in args.method or METHODS:
        table(home, method, base, experts[: args.experts], strategies, tried)


if __name__ == "__main__":
    main()
