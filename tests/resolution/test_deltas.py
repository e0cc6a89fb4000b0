"""Delta checkpoints as experts: differences from the base, merged as the experts they came from."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.errors import CheckpointError, CorruptionError, MergePipeError, RecipeError
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.facts.test_input_segments import flip
from tests.support.family import tensors_of, write_model

#: Methods on deltas, on values, and on angles; with method and model parameters.
METHODS = {
    "task_arithmetic": ("{lambda: 0.9}", "weight: 0.5"),
    "ties": ("", "weight: 0.5, density: 0.4"),
    "dare_ties": ("", "weight: 0.5, density: 0.4"),
    "breadcrumbs": ("", "weight: 0.5, density: 0.4"),
    "della": ("", "weight: 0.5, density: 0.4"),
    "sce": ("{select_topk: 0.5}", ""),
    "model_stock": ("", ""),
    "multislerp": ("", "weight: 0.5"),
    "nuslerp": ("", "weight: 0.5"),
    "ram": ("", ""),
    "linear": ("", "weight: 0.5"),
    "auto": ("", "weight: 0.5"),
}


@dataclass(frozen=True)
class Trio:
    """A base, two full float32 experts, and the same experts as delta checkpoints.

    The second delta leaves out what the expert does not change.
    """

    base: Path
    full: tuple[Path, Path]
    deltas: tuple[Path, Path]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    folder = tmp_path_factory.mktemp("trio")
    base = tensors_of(3, None, dtype=torch.float32)
    write_model(folder / "base", base)
    full, deltas = [], []
    for i in range(2):
        expert = tensors_of(3, i, dtype=torch.float32)
        # Sums and differences of these are exact in float32, so that nothing rounds but the merge.
        delta = {n: _coarse(v - base[n], base[n]) for n, v in expert.items()}
        if i == 1:
            delta = {n: torch.zeros_like(d) if "k_proj" in n else d for n, d in delta.items()}
        full.append(write_model(folder / f"full_{i}", {n: base[n] + delta[n] for n in base}))
        kept = {n: d for n, d in delta.items() if i == 0 or "k_proj" not in n}
        deltas.append(write_delta(folder / f"delta_{i}", kept))
    return Trio(folder / "base", (full[0], full[1]), (deltas[0], deltas[1]))


def _coarse(delta: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The delta that base + delta has, which is exact where it is small against the base."""
    return (base + delta) - base


def write_delta(folder: Path, values: dict[str, torch.Tensor], mark: str = "delta") -> Path:
    folder.mkdir()
    save_file(values, folder / "model.safetensors", metadata={"mergepipe": mark})
    return folder


def recipe(method: str, base: Path, models: Sequence[Path]) -> str:
    parameters, own = METHODS[method]
    lines = [f"merge_method: {method}", f"base_model: {base}", "models:"]
    for model in models:
        lines += [f"- model: {model}", *([f"  parameters: {{{own}}}"] if own else [])]
    return "\n".join([*lines, f"parameters: {parameters or '{}'}", "out_dtype: float32", ""])


@pytest.mark.parametrize("method", METHODS)
def test_delta_checkpoints_merge_like_the_experts_they_came_from(
    home: Warehouse, trio: Trio, method: str
) -> None:
    whole = tensors(run(home, recipe(method, trio.base, trio.full)).snapshot.path)
    apart = tensors(run(home, recipe(method, trio.base, trio.deltas)).snapshot.path)
    assert whole.keys() == apart.keys()
    largest = max(float(v.abs().max()) for v in whole.values())
    for name, value in whole.items():
        assert float((value - apart[name]).abs().max()) <= 1e-6 * largest, name


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "linear"])
def test_a_delta_and_a_full_expert_mix_in_one_recipe(
    home: Warehouse, trio: Trio, method: str
) -> None:
    whole = tensors(run(home, recipe(method, trio.base, trio.full)).snapshot.path)
    mixed = (trio.deltas[0], trio.full[1])
    apart = tensors(run(home, recipe(method, trio.base, mixed)).snapshot.path)
    for name, value in whole.items():
        torch.testing.assert_close(apart[name], value, rtol=1e-6, atol=1e-6)


def test_a_delta_costs_only_the_bytes_of_what_it_changes(home: Warehouse, trio: Trio) -> None:
    nbytes = sum(v.numel() * 4 for v in tensors(trio.deltas[1]).values())
    outcome = run(home, recipe("task_arithmetic", trio.base, [trio.deltas[1]]))
    assert outcome.plan.estimates.expert_bytes_total == nbytes
    assert 0 < outcome.summary()["expert_bytes_read"] <= nbytes
    s = run(home, recipe("task_arithmetic", trio.base, [trio.deltas[0]]), budget="30%").summary()
    assert 0 < s["expert_bytes_read"] == s["expert_bytes_planned"] <= s["budget_bytes"]


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "multislerp"])
def test_a_budget_of_zero_gives_the_base(home: Warehouse, trio: Trio, method: str) -> None:
    outcome = run(home, recipe(method, trio.base, trio.deltas), budget="0")
    assert outcome.summary()["expert_bytes_read"] == 0
    base = tensors(trio.base)
    for name, value in tensors(outcome.snapshot.path).items():
        assert torch.equal(value, base[name]), name


def test_a_registered_delta_is_analysed_against_its_base(home: Warehouse, trio: Trio) -> None:
    register(home, trio.base, "base")
    register(home, trio.deltas[0], "skill", base="base")
    (found,) = analyze(home, ["skill"])
    values = tensors(trio.deltas[0]).values()
    norm = sum(float(v.double().square().sum()) for v in values) ** 0.5
    assert found.norm == pytest.approx(norm, rel=1e-6)


def test_a_delta_without_a_base_model_is_refused_with_what_to_add(
    home: Warehouse, trio: Trio
) -> None:
    text = recipe("linear", trio.base, trio.deltas).replace(f"base_model: {trio.base}\n", "")
    with pytest.raises(MergePipeError, match="needs a model to add it to") as caught:
        resolve(home, parse(text, name="t", where="t"))
    assert "base_model" in str(caught.value)


def test_a_delta_of_integers_or_of_another_shape_is_refused(
    home: Warehouse, trio: Trio, tmp_path: Path
) -> None:
    name = "model.norm.weight"
    whole = write_delta(tmp_path / "whole", {name: torch.ones(64, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match="of a dtype without arithmetic"):
        run(home, recipe("task_arithmetic", trio.base, [whole]))
    short = write_delta(tmp_path / "short", {name: torch.ones(63)})
    with pytest.raises(RecipeError, match="has 1 tensors that do not fit"):
        run(home, recipe("task_arithmetic", trio.base, [short]))


def test_a_delta_with_a_tensor_that_the_base_lacks_is_not_merged_silently(
    home: Warehouse, trio: Trio, tmp_path: Path
) -> None:
    folder = shutil.copytree(trio.deltas[0], tmp_path / "odd")
    values = tensors(folder) | {"model.layers.7.mlp.up_proj.weight": torch.ones(4, 4)}
    save_file(values, folder / "model.safetensors", metadata={"mergepipe": "delta"})
    warnings = run(home, recipe("task_arithmetic", trio.base, [folder])).plan.warnings
    assert any("layers.7" in w and "left out" in w for w in warnings)


def test_a_delta_that_flipped_since_it_was_digested_is_not_analysed(
    home: Warehouse, tmp_path: Path, trio: Trio
) -> None:
    delta = Path(shutil.copytree(trio.deltas[0], tmp_path / "delta"))
    register(home, str(trio.base), name="base")
    checkpoint = register(home, str(delta), name="delta").checkpoint
    Contents(home, checkpoint).learn()
    name = max(checkpoint.tensors, key=lambda t: t.numel).name
    flip(delta, name, 0.3)
    with pytest.raises(CorruptionError, match=name):
        analyze(home, ["delta"], base="base")
