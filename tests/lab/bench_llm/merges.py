"""Merges of a family of experts: whole with tuned scales, and under budgets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from mergepipe_pipeline.domain.plan import Estimates
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench.bench_budget import distance, forget, run
from tests.lab.bench.cases import mergekit
from tests.lab.bench.pack_cells import STRATEGIES
from tests.lab.bench_llm.answers import Answers, Model, answered
from tests.lab.bench_llm.kinds import Kind
from tests.lab.bench_llm.score import Scored, Scores, whole
from tests.lab.bench_llm.tasks import Task

#: The seed that scales are tuned with.
FIRST_SEED = 0
BUDGETS = ("50%", "25%", "12.5%", "6.25%", "3%", "1.5%", "0.5%")
_SCALES = (0.2, 0.3, 0.45, 0.7, 1.0)
#: Items of each task in the validation split that a scale is chosen by.
_TUNED_ON = 64


@dataclass(frozen=True, slots=True)
class Method:
    """A method with its parameters; `{}` stands for the scale where it has one."""

    operator: str
    own: str
    whole: str = "normalize: false, lambda: {}"

    @property
    def is_mergekit(self) -> bool:
        """Whether mergekit has it, too."""
        return self.operator != "auto"

    @property
    def scales(self) -> tuple[float, ...]:
        """What its parameter is tuned among; a method without one has one scale."""
        return _SCALES if "{}" in self.whole else (1.0,)

    def recipe(self, base: Path, experts: Sequence[Path], scale: float) -> str:
        """The recipe's text, which mergekit reads, too, but for `linear`."""
        rows = "".join(f"- {{model: {e}, parameters: {{{self.own}}}}}\n" for e in experts)
        text = f"merge_method: {self.operator}\nbase_model: {base}\ndtype: bfloat16\n"
        if parameters := self.whole.format(scale):
            text += f"parameters: {{{parameters}}}\n"
        return f"{text}models:\n{rows}"


METHODS = (
    Method("task_arithmetic", "weight: 1.0"),
    Method("ties", "weight: 1.0, density: 0.3"),
    Method("dare_ties", "weight: 1.0, density: 0.5"),
    Method("breadcrumbs", "weight: 1.0, density: 0.9, gamma: 0.01"),
    Method("della", "weight: 1.0, density: 0.5, epsilon: 0.1"),
    Method("linear", "weight: 1.0", ""),
    Method("model_stock", "", ""),
    Method("sce", "", "select_topk: 0.1"),
    Method("auto", "weight: 1.0, density: 0.5"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """A base with the experts of all tasks, of one kind and seed; scores stand in `home`."""

    kind: Kind
    seed: int
    base: Path
    experts: tuple[Path, ...]
    home: Path
    until: float

    @property
    def key(self) -> str:
        """What tells the family from others in the file of scores."""
        return f"{self.kind.name} {self.seed}"

    @property
    def scored(self) -> Scored:
        """The scores so far."""
        return Scored(self.home / "scores.jsonl", self.until)

    @property
    def packed(self) -> Path:
        """The warehouse that has the experts' packs."""
        return self.home / "warehouses" / self.key.replace(" ", "-")


def pack_all(family: Family) -> None:
    """Make the warehouse with the experts' packs; what it has stays."""
    home = Warehouse.at(family.packed).ensure()
    register(home, family.base, family.base.name)
    for expert in family.experts:
        register(home, expert, expert.name, family.base.name)
    with family.scored.part("pack"):
        pack(home, [e.name for e in family.experts])


def single(family: Family, expert: Path | None) -> None:
    """Score an expert, or the base."""
    scored, base = family.scored, family.base
    if expert is None:
        scored.put(family.kind.model.name, lambda: whole(Model(base, base), family.kind.tasks))
    else:
        scored.put(f"{family.key} {expert.name}", partial(_whole, family, expert))


def tune(family: Family, method: Method, scale: float) -> None:
    """Score a scale of a method on the validation split."""
    scored, key = family.scored, f"{family.key} {method.operator} scale {scale}"
    if key not in scored:
        text = method.recipe(family.base, family.experts, scale)
        with _own(family) as home, _merged(home, scored, text, None) as (folder, _):
            scored.put(key, partial(_valid, family, folder))


def ranked(family: Family) -> list[Method]:
    """All methods, the best of the validation split of the first seed first."""
    return sorted(METHODS, key=lambda m: -_tuned(family, m)[1])


def judge(family: Family, method: Method, budgets: Sequence[str]) -> None:
    """Score the full merge, mergekit's, and those under the budgets, from packs and from blocks."""
    scored, name = family.scored, f"{family.key} {method.operator}"
    keys = [f"{name} {budget} {source}" for budget in budgets for source in STRATEGIES]
    has_peer = family.seed == FIRST_SEED and method.is_mergekit
    missing = [key for key in keys if key not in scored]
    asked = [f"{name} 100%", *([f"{name} mergekit"] if has_peer else [])]
    if not missing and all(key in scored for key in asked):
        return
    text = method.recipe(family.base, family.experts, _tuned(family, method)[0])
    with _own(family) as home, _merged(home, scored, text, None) as (full, promised):
        scored.put(f"{name} 100%", lambda: _whole(family, full))
        with scored.part("score"):
            model, tasks = Model(full, family.base), family.kind.tasks
            answers = answered(model, "test", tasks) if missing else {}
            one = distance(full, family.base)
        for key in missing:
            *_, budget, source = key.split()
            with _merged(home, scored, text, budget, STRATEGIES[source]) as (folder, planned):
                find: Callable[[], Scores] = partial(_beside, family, folder, full, one, answers)
                if folder.name == full.name:  # which is that of its bits
                    find = partial(_equal, scored[f"{name} 100%"], tasks)
                read = planned.expert_bytes_planned / promised.expert_bytes_total
                scored.put(key, find, read=read)
        if has_peer and f"{name} mergekit" not in scored:
            # There a base of `linear` is one more model, which has to have a weight.
            of_linear = text.replace(f"base_model: {family.base}\n", "")
            own = of_linear if method.operator == "linear" else text
            with _by_mergekit(scored, own) as theirs:
                scored.put(f"{name} mergekit", lambda: _beside(family, theirs, full, one))


def _whole(family: Family, folder: Path, full: Mapping[str, Answers] | None = None) -> Scores:
    return whole(Model(folder, family.base), family.kind.tasks, full)


def _valid(family: Family, folder: Path) -> Scores:
    found = answered(Model(folder, family.base), "valid", family.kind.tasks, _TUNED_ON)
    return {task: a.share for task, a in found.items()}


def _tuned(family: Family, method: Method) -> tuple[float, float]:
    """The scale with the most right answers, the smallest of equals, and their mean share."""
    scored, key = family.scored, f"{family.kind.name} {FIRST_SEED} {method.operator} scale"
    shares = {scale: mean(scored[f"{key} {scale}"].values()) for scale in method.scales}
    best = max(shares, key=lambda scale: (shares[scale], -scale))
    return best, shares[best]


def _beside(
    family: Family,
    folder: Path,
    full: Path,
    one: float,
    answers: Mapping[str, Answers] | None = None,
) -> Scores:
    """A merge's scores, and how far it is from the full merge, in units of `one`."""
    return _whole(family, folder, answers) | {"error": distance(folder, full) / one}


def _equal(full: Scores, tasks: Sequence[Task]) -> Scores:
    return full | {f"kl {task.name}": 0.0 for task in tasks} | {"error": 0.0}


@contextmanager
def _own(family: Family) -> Iterator[Warehouse]:
    """A warehouse with the family's packs for one job, since each forgets what it merged."""
    with TemporaryDirectory(dir=family.home) as place:
        for part in ("catalog", "packs"):
            shutil.copytree(family.packed / part, Path(place) / part, copy_function=os.link)
        yield Warehouse.at(Path(place)).ensure()


@contextmanager
def _by_mergekit(scored: Scored, text: str) -> Iterator[Path]:
    """The folder of mergekit's merge, removed afterwards."""
    with TemporaryDirectory() as place:
        recipe, out = Path(place) / "recipe.yaml", Path(place) / "out"
        recipe.write_text(text)
        with scored.part("mergekit"):
            subprocess.run(mergekit(recipe, out), check=True, timeout=3600)
        yield out


@contextmanager
def _merged(
    home: Warehouse, scored: Scored, text: str, budget: str | None, strategy: str = "full"
) -> Iterator[tuple[Path, Estimates]]:
    """A merge's folder, removed afterwards, and what its plan promised."""
    with scored.part("merge"):
        found, promised = run(home, text, budget, strategy)
    # Out of the way of the same snapshot from another plan, as of a budget that is enough for all.
    with TemporaryDirectory(dir=home.root) as place:
        kept = found.rename(Path(place) / found.name)
        yield kept, promised
        forget(home, kept)
