"""The merge end to end, in process: what is read, what comes out, what is reused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.execution.lookup import load_plan
from mergepipe_pipeline.execution.run import MergeOutcome, run_plan
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.operators.steps.random import keep_mask
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage import read_batch
from mergepipe_pipeline.storage.compiled_reads import COPY, run_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.oracles import ORACLES, Case

pytestmark = pytest.mark.usefixtures("baselines")

METHODS = {
    "linear": "",
    "task_arithmetic": "{lambda: 0.9, normalize: true}",
    "ties": "{density: 0.3}",
    "dare_linear": "{density: 0.5}",
    "dare_ties": "{density: 0.5}",
}
WEIGHTS = (1.0, 0.5, 0.25, 0.75)


def run(
    home: Warehouse, text: str, *, options: EngineOptions | None = None, **planning: object
) -> MergeOutcome:
    """Plan and merge recipe text."""
    raw = parse(text, name="test", where="test")
    return run_plan(home, plan_in_stages(home, raw, **planning), options=options)  # type: ignore[arg-type]


def tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder, read by the safetensors library."""
    out: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        out |= load_file(file)
    return out


@pytest.mark.parametrize("method", METHODS)
def test_a_full_merge_equals_the_float64_oracle_on_whole_tensors(
    home: Warehouse, family: Path, recipe_text: Callable[..., str], method: str
) -> None:
    text = recipe_text(method, METHODS[method], extra="out_dtype: float32", base=method != "linear")
    merged = tensors(run(home, text).snapshot.path)
    base = tensors(family / "base")
    experts = [tensors(family / f"expert_{i:02d}") for i in range(4)]
    extra = {"linear": {}, "task_arithmetic": {"lambda": 0.9, "normalize": True}}.get(method, {})
    density = {"ties": 0.3, "dare_linear": 0.5, "dare_ties": 0.5}.get(method)
    for name, value in merged.items():
        flat = base[name].double().flatten().numpy()
        case = Case(
            base=None if method == "linear" else flat,
            experts=np.stack([e[name].double().flatten().numpy() for e in experts]),
            params=extra,
            model_params=tuple(
                {"weight": w} | ({"density": density} if density else {}) for w in WEIGHTS
            ),
            keep=np.stack([keep_mask(0, i, name, 0, len(flat), density or 1.0) for i in range(4)]),
        )
        np.testing.assert_allclose(
            value.double().flatten().numpy(),
            ORACLES[method](case),
            rtol=2e-6,
            atol=2e-8,
            err_msg=name,
        )


def test_a_second_merge_executes_no_layer_and_names_the_same_snapshot(
    home: Warehouse, recipe_text: Callable[..., str]
) -> None:
    first, second = run(home, recipe_text()), run(home, recipe_text())
    assert second.snapshot.snapshot_id == first.snapshot.snapshot_id
    assert (first.summary()["layers_executed"], first.summary()["layers_reused"]) == (4, 0)
    assert (second.summary()["layers_executed"], second.summary()["layers_reused"]) == (0, 4)
    assert second.summary()["expert_bytes_read"] == 0


def test_full_budget_and_no_budget_and_none_are_one_snapshot(
    tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    ids = set()
    for i, budget in enumerate((None, "100%", "none", "1TiB")):
        home = Warehouse.at(tmp_path / str(i)).ensure()
        ids.add(run(home, recipe_text(), budget=budget).snapshot.snapshot_id)
    assert len(ids) == 1


@pytest.mark.parametrize("method", [m for m in METHODS if m != "linear"])
def test_budget_zero_gives_the_bits_of_the_base(
    home: Warehouse, family: Path, recipe_text: Callable[..., str], method: str
) -> None:
    outcome = run(home, recipe_text(method, METHODS[method]), budget="0")
    assert outcome.summary()["expert_bytes_read"] == 0
    merged, base = tensors(outcome.snapshot.path), tensors(family / "base")
    for name, value in merged.items():
        assert torch.equal(value.view(torch.int16), base[name].view(torch.int16)), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", ["magnitude", "hash", "drop-experts"])
@pytest.mark.parametrize("budget", ["10%", "37%", "100001"])
def test_bytes_read_are_the_bytes_planned_and_within_the_budget(
    home: Warehouse, recipe_text: Callable[..., str], method: str, strategy: str, budget: str
) -> None:
    text = recipe_text(method, METHODS[method])
    s = run(home, text, budget=budget, strategy=strategy).summary()
    assert s["expert_bytes_read"] == s["expert_bytes_planned"] <= s["budget_bytes"]
    assert s["budget_bytes"] < s["expert_bytes_total"]


def test_the_kernel_counts_no_more_expert_bytes_than_planned(
    home: Warehouse, family: Path, recipe_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_in_stages(home, parse(recipe_text(), name="t", where="t"), budget="25%")
    counted: dict[str, int] = {}
    alone = os.preadv

    def count(handle: int, offset: int, nbytes: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        header = 8 + int.from_bytes(Path(path).read_bytes()[:8], "little")
        if offset >= header:
            counted[path] = counted.get(path, 0) + nbytes

    def counting(handle: int, buffers: list[memoryview], offset: int) -> int:
        n = alone(handle, buffers, offset)
        count(handle, offset, n)
        return n

    def counting_all(requests: npt.NDArray[np.int64], scratch: npt.NDArray[np.uint8]) -> int:
        for kind, handle, offset, nbytes, _ in requests.tolist():
            if kind != COPY:
                count(handle, offset, nbytes)
        return run_all(requests, scratch)

    monkeypatch.setattr(os, "preadv", counting)
    monkeypatch.setattr(read_batch, "run_all", counting_all)
    outcome = run_plan(home, plan)
    experts = sum(n for path, n in counted.items() if "expert_" in path)
    assert experts == outcome.summary()["expert_bytes_planned"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_windows_threads_and_block_sizes_change_no_bit_and_no_id(
    tmp_path: Path, recipe_text: Callable[..., str], method: str
) -> None:
    ids = set()
    options = [
        EngineOptions(),
        EngineOptions(threads=1, window_elems=1000),
        EngineOptions(threads=2, window_elems=4097),
    ]
    for i, (given, block) in enumerate(zip(options, (None, 4096, 65536), strict=True)):
        home = Warehouse.at(tmp_path / str(i)).ensure()
        text = recipe_text(method, METHODS[method])
        outcome = run(home, text, options=given, block_elems=block)
        ids.add((outcome.plan.plan_id, outcome.snapshot.snapshot_id))
    assert len(ids) == 1


def test_a_partial_plan_gives_the_same_bits_for_any_window(
    tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    ids = set()
    for i, window in enumerate((None, 777, 8192)):
        home = Warehouse.at(tmp_path / str(i)).ensure()
        outcome = run(home, recipe_text(), budget="30%", options=EngineOptions(window_elems=window))
        ids.add(outcome.snapshot.snapshot_id)
    assert len(ids) == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", ["5%", "30%", "70%"])
def test_the_realised_error_stays_within_the_printed_bound(
    home: Warehouse, recipe_text: Callable[..., str], method: str, budget: str
) -> None:
    text = recipe_text(method, METHODS[method], extra="out_dtype: float32")
    full, part = run(home, text), run(home, text, budget=budget)
    bound = part.plan.estimates.error_bound
    a, b = tensors(full.snapshot.path), tensors(part.snapshot.path)
    squared = sum(float((a[n].double() - b[n].double()).square().sum()) for n in a)
    assert bound is not None
    assert 0 < squared**0.5 <= bound * (1 + 1e-6)
    assert full.plan.estimates.error_bound == 0


def test_buying_by_magnitude_errs_less_than_buying_by_hash_or_dropping_experts(
    home: Warehouse, recipe_text: Callable[..., str]
) -> None:
    text = recipe_text("task_arithmetic", "", extra="out_dtype: float32")
    full = tensors(run(home, text).snapshot.path)
    errors = {}
    for strategy in ("magnitude", "hash", "drop-experts"):
        part = tensors(run(home, text, budget="30%", strategy=strategy).snapshot.path)
        errors[strategy] = sum(float((full[n] - part[n]).double().square().sum()) for n in full)
    assert errors["magnitude"] < errors["hash"]
    assert errors["magnitude"] < errors["drop-experts"]


def test_a_stored_plan_is_the_plan_that_was_made(
    home: Warehouse, recipe_text: Callable[..., str]
) -> None:
    plan = plan_in_stages(home, parse(recipe_text(), name="t", where="t"), budget="25%")
    assert load_plan(home, plan.plan_id) == plan


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_memory_held_does_not_grow_with_the_number_of_experts(
    home: Warehouse, recipe_text: Callable[..., str], dtype: str
) -> None:
    from mergepipe_pipeline.engine.jobs import Job
    from mergepipe_pipeline.engine.options import EngineOptions
    from mergepipe_pipeline.engine.sources import SourcePool

    options = EngineOptions()
    plan = plan_in_stages(home, parse(recipe_text(), name="t", where="t"))
    task = next(t for layer in plan.layers for t in layer.tasks if t.experts)
    one = task.experts[0]
    one = replace(one, view=replace(one.view, dtype=dtype))
    for k in (1, 2, 20, 100, 400):
        with SourcePool(plan) as sources:
            job = Job(replace(task, experts=(one,) * k), sources)
        window = options.window_for(job.working_bytes_per_elem, 2)
        rows = 0 if dtype == "BF16" else 4 * (k + 1)
        held = window * options.workers * ((k + 1) * (2 if dtype == "BF16" else 4) + rows)
        assert held <= options.most_bytes or window == 4096


def test_experts_that_a_copy_gave_one_time_are_told_apart(
    home: Warehouse, family: Path, tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    merged = set()
    for n in range(2):
        copy = tmp_path / f"copy_{n}"
        shutil.copytree(family / f"expert_0{n}", copy)
        for file in copy.iterdir():
            os.utime(file, ns=(0, 0))
        text = (
            f"merge_method: task_arithmetic\nbase_model: {family / 'base'}\n"
            f"models:\n- {{model: {copy}, parameters: {{weight: 1.0}}}}\n"
        )
        merged.add(run(home, text).snapshot.snapshot_id)
    assert len(merged) == 2
