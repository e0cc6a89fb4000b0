"""Merges under a budget from packs and from blocks, compared with the full merge, in one warehouse.

All are the project's own merges, in float32 so that no cast hides a difference. Percentages are of
the experts' stored bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench.bench_budget import distance, forget, run

#: What a budget is spent on: levels of packs, or blocks of the originals by magnitude.
STRATEGIES = {"packs": "packs", "blocks": "magnitude"}
Skill = Callable[[Path], float]


@dataclass(frozen=True, slots=True)
class Method:
    """A method with its parameters per expert and of the whole, as YAML."""

    name: str
    operator: str
    own: str
    whole: str = "normalize: false"

    def recipe(self, base: Path, experts: Sequence[Path]) -> str:
        """The recipe's text."""
        rows = "".join(f"- {{model: {e}, parameters: {{{self.own}}}}}\n" for e in experts)
        head = f"merge_method: {self.operator}\nbase_model: {base}\nparameters: {{{self.whole}}}\n"
        return f"{head}dtype: float32\nout_dtype: float32\nmodels:\n{rows}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One merge: its error relative to the full merge's update, as found, foretold and bounded.

    `nbytes_share` is what it read of the experts' stored bytes; `skill` is None where no task is.
    """

    method: str
    budget: str
    source: str
    error: float
    predicted: float | None
    bound: float | None
    nbytes_share: float
    skill: float | None


@contextmanager
def packed_home(folder: Path, base: Path, experts: Sequence[Path]) -> Iterator[Warehouse]:
    """A warehouse below `folder` that has packed all experts, removed afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as place:
        home = Warehouse.at(place).ensure()
        register(home, base, base.name)
        for expert in experts:
            register(home, expert, expert.name, base.name)
        pack(home, [e.name for e in experts])
        yield home


def cells(
    home: Warehouse,
    method: Method,
    base: Path,
    experts: Sequence[Path],
    budgets: Sequence[str],
    skill: Skill | None = None,
) -> Iterator[Cell]:
    """The full merge, then every budget from packs and from blocks. Raises on a violated bound."""
    text = method.recipe(base, experts)
    found, promised = run(home, text, None, "full")
    full = found.with_name("full")
    found.rename(full)
    update, total = distance(full, base), promised.expert_bytes_total
    tried: Skill | Callable[[Path], None] = skill or (lambda _: None)
    yield Cell(method.name, "100%", "full", 0.0, 0.0, 0.0, 1.0, tried(full))
    for budget in budgets:
        for source, strategy in STRATEGIES.items():
            found, e = run(home, text, budget, strategy)
            error = distance(found, full)
            if e.error_bound is not None and error > e.error_bound * (1 + 1e-6):
                raise SystemExit(f"{method.name}, {budget}, {source}: {error} > {e.error_bound}")
            yield Cell(
                method.name,
                budget,
                source,
                error / update,
                None if e.predicted_error is None else e.predicted_error / update,
                None if e.error_bound is None else e.error_bound / update,
                e.expert_bytes_planned / total,
                tried(found),
            )
            forget(home, found)
    shutil.rmtree(full)


def least_exact(home: Warehouse, method: Method, base: Path, experts: Sequence[Path]) -> float:
    """The least budget, in tenths of a percent, that gives the full merge from originals; merged.

    Raises SystemExit if that merge gives another snapshot.
    """
    raw = parse(method.recipe(base, experts), name="bench", where="bench")
    full = make_plan(home, raw, no_packs=True)
    below, enough = 0, 1000
    while enough - below > 1:
        tenths = (below + enough) // 2
        if make_plan(home, raw, budget=f"{tenths / 10}%").plan_id == full.plan_id:
            enough = tenths
        else:
            below = tenths
    found = []
    for plan in (make_plan(home, raw, budget=f"{enough / 10}%"), full):
        snapshot = Path(run_plan(home, plan).snapshot.path)
        found.append(snapshot.name)
        forget(home, snapshot)
    if found[0] != found[1]:
        raise SystemExit(f"{method.name}: {enough / 10} % gives {found[0]}, all bytes {found[1]}")
    return enough / 10
