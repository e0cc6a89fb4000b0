"""Times the engine on a small family made for it: real verbs, inputs in the page cache.

The part of `calibrate` that is not storage. What a merge costs is seen with few experts and with
many, and a line through both says what an element and an expert cost.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from mergepipe_pipeline.execution.leases import staging
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.spec.engine_pace import MethodPace
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.storage.writer import ShardWriter
from mergepipe_pipeline.warehouse import Warehouse

#: One of each family of operators; a budget is bought alike for all that have the same response.
METHODS = (
    "linear",
    "task_arithmetic",
    "ties",
    "dare_linear",
    "dare_ties",
    "breadcrumbs",
    "sce",
    "slerp",
    "della",
)
FEW, MANY = 2, 6
TENSORS = 16
_ROWS, _COLUMNS = 1024, 1024
ELEMS = TENSORS * _ROWS * _COLUMNS
_LAYERS = 4
_BUDGET = "10%"
_REPEATS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MethodCost:
    """What one method cost with `k` experts: wall seconds of planning, CPU seconds of the rest.

    `budget_plan_s` None: it takes no budget. `facts_cpu_s` is what the first plan took more, for
    the facts of `fresh` experts.
    """

    k: int
    plan_s: float
    budget_plan_s: float | None
    facts_cpu_s: float
    fresh: int
    merge_cpu_s: float


@dataclass(frozen=True, slots=True)
class Trial:
    """What the small family showed; see `EnginePace`."""

    start_s: float
    commit_s: float
    analysis_elem_s: float
    methods: dict[str, MethodPace]


def pace_of(costs: Sequence[MethodCost], elems: int = ELEMS, tensors: int = TENSORS) -> MethodPace:
    """What explains the costs of a method with few and with many experts, nothing below 0.

    With one number of experts only, what a merge costs is put on the output's elements.
    """
    plan_s, plan_input_s = line([(c.k * tensors, c.plan_s) for c in costs])
    fixed_s, per_elem_s = line([(c.k * elems, c.merge_cpu_s) for c in costs])
    most = costs[-1]
    more_s = 0.0 if most.budget_plan_s is None else most.budget_plan_s - most.plan_s
    return MethodPace(
        plan_s=plan_s,
        plan_input_s=plan_input_s,
        budget_input_s=max(0.0, more_s) / (most.k * tensors),
        facts_elem_s=max(0.0, most.facts_cpu_s) / (most.fresh * elems),
        elem_s=fixed_s / elems,
        expert_elem_s=per_elem_s,
    )


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Height at 0 and slope of the line through the first and the last point, neither below 0."""
    (x, y), (last_x, last_y) = points[0], points[-1]
    slope = max(0.0, (last_y - y) / (last_x - x)) if last_x > x else 0.0
    height = max(0.0, y - slope * x)
    return (height, slope) if height else (0.0, last_y / last_x)


def try_engine(folder: Path, methods: Sequence[str] = METHODS) -> Trial:
    """Make a family in the empty `folder`, and time what the verbs do with it there."""
    base, *experts = _family(folder)
    runs = _Runs(Warehouse.at(folder / "home").ensure(), base, experts)
    analysis_elem_s = runs.analysis_elem_s()
    costs = {method: runs.costs(method) for method in methods}
    start_s, commit_s = runs.start_and_commit()
    return Trial(start_s, commit_s, analysis_elem_s, {m: pace_of(c) for m, c in costs.items()})


class _Runs:
    """The verbs on the family, each in this process but one, which shows what a process costs."""

    def __init__(self, home: Warehouse, base: Path, experts: Sequence[Path]) -> None:
        self._home, self._base, self._experts = home, base, experts

    def analysis_elem_s(self) -> float:
        """CPU seconds per element of an expert that nobody knows."""
        self._plan("task_arithmetic", FEW)  # libraries start with the first
        _, _, first_s = _timed(lambda: self._plan("task_arithmetic", MANY))
        _, _, again_s = _timed(lambda: self._plan("task_arithmetic", MANY))
        return max(0.0, first_s - again_s) / ((MANY - FEW) * ELEMS)

    def costs(self, method: str) -> list[MethodCost]:
        """A method's costs, with few experts and with many where it takes so many."""
        least, most = OPERATORS[method].schema.experts
        counts = sorted({min(max(k, least), most or k) for k in (FEW, MANY)})
        self._engine_s(self._plan(method, counts[0]))  # compiled code is loaded with the first
        found, known = [], 0
        for k in counts:
            found.append(self._cost(method, k, k - known))
            known = k
        return found

    def _cost(self, method: str, k: int, fresh: int) -> MethodCost:
        _, _, first_cpu_s = _timed(lambda: self._plan(method, k))
        plan, plan_s, plan_cpu_s = _best(lambda: self._plan(method, k))
        budget_s = None
        if OPERATORS[method].schema.base == "required":
            self._plan(method, k, _BUDGET)
            _, budget_s, _ = _best(lambda: self._plan(method, k, _BUDGET))
        merge_cpu_s = min(self._engine_s(plan) for _ in range(_REPEATS))
        return MethodCost(k, plan_s, budget_s, first_cpu_s - plan_cpu_s, fresh, merge_cpu_s)

    def start_and_commit(self) -> tuple[float, float]:
        """Seconds that a merge takes beside planning and the engine, and of its commit."""
        from mergepipe_pipeline.execution.run import run_plan
        from mergepipe_pipeline.execution.snapshot import commit

        recipe = self._base.parent / "recipe.yml"
        recipe.write_text(self._recipe("ties", FEW), encoding="utf-8")
        command = [sys.executable, "-m", "mergepipe_pipeline.cli.main"]
        command += ["--home", str(self._home.root), "merge", str(recipe), "--json"]

        def in_process() -> None:
            self._forget()
            subprocess.run(command, check=True, capture_output=True)

        def in_this() -> MergePlan:
            self._forget()
            plan = self._plan("ties", FEW)
            run_plan(self._home, plan)
            return plan

        _, whole_s, _ = _best(in_process)
        plan, here_s, _ = _best(in_this)
        _, commit_s, _ = _best(lambda: commit(self._home, plan))
        return max(0.0, whole_s - here_s), commit_s

    def _engine_s(self, plan: MergePlan) -> float:
        """CPU seconds of the engine alone, all cores at work."""
        from mergepipe_pipeline.engine.execute import LayerRunner
        from mergepipe_pipeline.engine.options import EngineOptions

        def run() -> None:
            with LayerRunner(plan, EngineOptions()) as runner:
                list(runner.run_all([(layer, folder / layer.name) for layer in plan.layers]))

        with staging(self._home, "trial") as folder:
            return _timed(run)[2]

    def _plan(self, method: str, k: int, budget: str | None = None) -> MergePlan:
        raw = parse(self._recipe(method, k), name="trial", where="calibrate")
        return make_plan(self._home, raw, budget=budget)

    def _recipe(self, method: str, k: int) -> str:
        schema = OPERATORS[method].schema
        given = {"weight": 0.5, "density": 0.5, "t": 0.5, "select_topk": 0.5}
        own = {p.name: given[p.name] for p in schema.parameters if p.name in given}
        base = [f"base_model: {self._base}"] if schema.base == "required" else []
        models = [f"- {{model: {expert}}}" for expert in self._experts[:k]]
        head = [f"merge_method: {method}", *base, f"parameters: {own}", "models:"]
        return "\n".join([*head, *models, ""])

    def _forget(self) -> None:
        """As if nothing had been merged."""
        for folder in (self._home.objects, self._home.actions, self._home.snapshots):
            shutil.rmtree(folder)
        self._home.ensure()


def _timed(function: Callable[[], T]) -> tuple[T, float, float]:
    """What a function gives, its wall seconds, and the CPU seconds of all threads meanwhile."""
    began, cpu_began = time.perf_counter(), time.process_time()
    found = function()
    return found, time.perf_counter() - began, time.process_time() - cpu_began


def _best(function: Callable[[], T]) -> tuple[T, float, float]:
    """As `_timed`, the quickest of some: what disturbs a run only adds to it."""
    return min((_timed(function) for _ in range(_REPEATS)), key=lambda run: run[1])


def _family(folder: Path) -> list[Path]:
    """A base and experts of bfloat16, near it; random, and the same everywhere."""
    random = np.random.default_rng(0)
    values = random.normal(0, 0.02, (TENSORS, _ROWS * _COLUMNS)).astype(np.float32)
    base = (values.view(np.uint32) >> 16).astype(np.uint16)
    found = []
    for number in range(MANY + 1):
        model = folder / f"model{number}"
        model.mkdir()
        (model / "config.json").write_text("{}")
        names = [f"model.layers.{n % _LAYERS}.w{n:02d}.weight" for n in range(TENSORS)]
        described = [(name, "BF16", (_ROWS, _COLUMNS)) for name in names]
        with ShardWriter(model / "model.safetensors", described, {"format": "pt"}) as writer:
            for bits in base:
                low = random.integers(0, 8, len(bits), np.uint16) if number else np.uint16(0)
                writer.write((bits ^ low).data)
            writer.finish()
        found.append(model)
    return found
