"""Merges of a family of experts: whole with tuned scales, and under budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from mergepipe_pipeline.domain.plan import Estimates
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench.bench_budget import distance, forget, run
from tests.lab.bench.pack_cells import STRATEGIES
from tests.lab.bench_llm.answers import Model
from tests.lab.bench_llm.score import Scored, answered, whole
from tests.lab.bench_llm.tasks import TASKS

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
    def has_scale(self) -> bool:
        """Whether one of its parameters is tuned."""
        return "{}" in self.whole

    def recipe(self, base: Path, experts: Sequence[Path], scale: float | None) -> str:
        """The recipe's text, which mergekit reads, too."""
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


@dataclass(frozen=True)
class Family:
    """A base with the experts of all tasks; `key` tells it from others in the file of scores."""

    key: str
    base: Path
    experts: tuple[Path, ...]


def judge(home: Warehouse, family: Family, scored: Scored, keep: int = 3) -> None:
    """Score base, experts, whole merges, and the best `keep` of them under all budgets."""
    for model in (family.base, *family.experts):
        key = f"{family.key} {model.name}"
        if key not in scored:
            scored.put(key, whole(Model(model, family.base)))
    for method in METHODS:
        _whole(home, family, method, scored)
    best = sorted(METHODS, key=lambda m: -mean_skill(scored, f"{family.key} {m.operator} 100%"))
    for method in best[:keep]:
        _budgets(home, family, method, scored)


def mean_skill(scored: Scored, key: str) -> float:
    """The mean share of right answers over all tasks."""
    return mean(scored[key][task.name] for task in TASKS)


def _whole(home: Warehouse, family: Family, method: Method, scored: Scored) -> None:
    """Tune the scale on the validation split, and score the merge with it."""
    key = f"{family.key} {method.operator}"
    if f"{key} 100%" in scored:
        return
    scale = _scale(home, family, method, scored) if method.has_scale else None
    with _merged(home, method.recipe(family.base, family.experts, scale), None) as (folder, _):
        scored.put(f"{key} 100%", whole(Model(folder, family.base)))


def _scale(home: Warehouse, family: Family, method: Method, scored: Scored) -> float:
    """The scale with the most right answers of the validation split; the smallest of equals."""
    best = (-1.0, 0.0)
    for scale in _SCALES:
        key = f"{family.key} {method.operator} scale {scale}"
        if key not in scored:
            text = method.recipe(family.base, family.experts, scale)
            with _merged(home, text, None) as (folder, _):
                scored.put(key, answered(Model(folder, family.base), "valid", most=_TUNED_ON))
        found = mean(scored[key].values())
        if found > best[0]:
            best = found, scale
    return best[1]


def _budgets(home: Warehouse, family: Family, method: Method, scored: Scored) -> None:
    """Score the merge under every budget, from packs and from blocks, beside the full merge."""
    name = f"{family.key} {method.operator}"
    keys = [f"{name} {budget} {source}" for budget in BUDGETS for source in STRATEGIES]
    if all(key in scored for key in keys):
        return
    scale = _scale(home, family, method, scored) if method.has_scale else None
    text = method.recipe(family.base, family.experts, scale)
    with _merged(home, text, None) as (full, promised):
        model, update = Model(full, family.base), distance(full, family.base)
        for key in keys:
            if key in scored:
                continue
            *_, budget, source = key.split()
            with _merged(home, text, budget, STRATEGIES[source]) as (folder, planned):
                found = whole(Model(folder, family.base), model)
                found["error"] = distance(folder, full) / update
                found["read"] = planned.expert_bytes_planned / promised.expert_bytes_total
                scored.put(key, found)


@contextmanager
def _merged(
    home: Warehouse, text: str, budget: str | None, strategy: str = "full"
) -> Iterator[tuple[Path, Estimates]]:
    """A merge's folder, removed afterwards, and what its plan promised."""
    found, promised = run(home, text, budget, strategy)
    # Out of the way of the same snapshot from another plan, as of a budget that is enough for all.
    with TemporaryDirectory(dir=home.root) as place:
        kept = found.rename(Path(place) / found.name)
        yield kept, promised
        forget(home, kept)
