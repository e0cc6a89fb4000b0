"""Measures the engine on a small family made for it: real plans and merges, inputs in memory.

The part of `calibrate` that is not storage. Work is counted as `forecast` counts it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from mergepipe_pipeline.checkpoints.writer import ShardWriter
from mergepipe_pipeline.domain.machine_profile import MethodPace
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_layers
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.timing.forecast import work_of
from mergepipe_pipeline.timing.time_model import OUTPUT_WEIGHT
from mergepipe_pipeline.warehouse import Warehouse

#: One of each kind of kernel; `time_model.SAME_KERNELS` says what else they stand for.
METHODS = (
    "linear",
    "task_arithmetic",
    "ties",
    "dare_ties",
    "breadcrumbs",
    "della",
    "sce",
    "slerp",
)
EXPERTS = 4
TENSORS = 16
_ROWS, _COLUMNS = 1024, 1024
_LAYERS = 4
_BUDGET = "10%"
#: What disturbs a run only adds to it, and the first one loads libraries: the quickest counts.
_REPEATS = 2
_START_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What the small family showed; see `EnginePace`."""

    start_s: float
    plan_input_s: float
    methods: dict[str, MethodPace]


def measure_engine(folder: Path, methods: Sequence[str] = METHODS) -> EngineFigures:
    """Make a family in the empty `folder`, and time what plans and merges of it take."""
    base, *experts = _family(folder)
    recipes = {method: _recipe(method, base, experts) for method in methods}
    fresh = (Warehouse.at(folder / f"home{n}").ensure() for n in count())
    paces = {m: _method_pace(parse(r, name=m, where=m), fresh) for m, r in recipes.items()}
    warehouse = next(fresh)
    return EngineFigures(
        start_s=_start_s(warehouse, folder / "recipe.yml", _recipe("ties", base, experts[:1])),
        plan_input_s=_plan_input_s(warehouse, _recipe("ties", base, experts)),
        methods=paces,
    )


def _method_pace(recipe: ParsedRecipe, fresh: Iterator[Warehouse]) -> MethodPace:
    """A method's pace, the best of warehouses that know nothing of the family."""
    tries = [_pace_in(next(fresh), recipe) for _ in range(_REPEATS)]
    return MethodPace(
        learn_byte_s=min(t.learn_byte_s for t in tries),
        merge_elem_s=min(t.merge_elem_s for t in tries),
    )


def _pace_in(warehouse: Warehouse, recipe: ParsedRecipe) -> MethodPace:
    work = work_of(resolve(warehouse, recipe))
    elems = OUTPUT_WEIGHT * work.out_elems + work.expert_elems
    learn_and_plan_s = _cpu_s(lambda: make_plan(warehouse, recipe))
    plan_s = _cpu_s(lambda: make_plan(warehouse, recipe))
    plan = make_plan(warehouse, recipe)
    return MethodPace(
        learn_byte_s=max(0.0, learn_and_plan_s - plan_s) / work.learn_nbytes,
        merge_elem_s=_cpu_s(lambda: list(run_layers(warehouse, plan))) / elems,
    )


def _plan_input_s(warehouse: Warehouse, recipe: str) -> float:
    """Wall seconds per (tensor, expert) that a budget adds to planning, all being known."""
    raw = parse(recipe, name="benchmark", where="calibrate")

    def plan_s(budget: str | None) -> float:
        make_plan(warehouse, raw, budget=budget)  # learns what is not known
        return min(
            _wall_s(lambda: make_plan(warehouse, raw, budget=budget)) for _ in range(_REPEATS)
        )

    return max(0.0, plan_s(_BUDGET) - plan_s(None)) / (EXPERTS * TENSORS)


def _start_s(warehouse: Warehouse, file: Path, recipe: str) -> float:
    """Wall seconds of a process that merges next to nothing."""
    file.write_text(recipe, encoding="utf-8")
    command = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "--home", str(warehouse.root)]
    command += ["merge", str(file), "--fresh", "--json"]

    def run() -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=_START_TIMEOUT_S)

    return min(_wall_s(run) for _ in range(_REPEATS))  # the first learns what is not known


def _cpu_s(function: Callable[[], object]) -> float:
    """CPU seconds of all threads while `function` runs."""
    began = time.process_time()
    function()
    return time.process_time() - began


def _wall_s(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _recipe(method: str, base: Path, experts: Sequence[Path]) -> str:
    """A recipe of as many experts as the method takes."""
    schema = OPERATORS[method].schema
    defaults = {"weight": 0.5, "density": 0.5, "t": 0.5, "select_topk": 0.5}
    own = {p.name: defaults[p.name] for p in schema.parameters if p.name in defaults}
    based = [f"base_model: {base}"] if schema.base == "required" else []
    models = [f"- {{model: {expert}}}" for expert in experts[: schema.experts[1]]]
    head = [f"merge_method: {method}", *based, f"parameters: {own}", "models:"]
    return "\n".join([*head, *models, ""])


def _family(folder: Path) -> list[Path]:
    """A base and experts of bfloat16, near it; random, and the same everywhere."""
    random = np.random.default_rng(0)
    values = random.normal(0, 0.02, (TENSORS, _ROWS * _COLUMNS)).astype(np.float32)
    base = (values.view(np.uint32) >> 16).astype(np.uint16)
    folders = []
    for number in range(EXPERTS + 1):
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
        folders.append(model)
    return folders
