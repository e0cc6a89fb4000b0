"""The same result as mergekit 0.1.5 at full budget: recorded and, if it is here, live."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.golden.make_golden import EXPERTS, GOLDEN, RECIPES, family_digest, recipe
from tests.parity.peer import run_mergekit
from tests.support.family import make_family
from tests.support.oracles import trim_keep

Tensors = dict[str, torch.Tensor]

live = pytest.mark.skipif(
    importlib.util.find_spec("mergekit") is None, reason="mergekit is not installed (.[peer])"
)


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("trio"), EXPERTS)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensors]:
    out: dict[str, Tensors] = {}
    for key, value in load_file(GOLDEN).items():
        name, tensor = key.split("/", 1)
        out.setdefault(name, {})[tensor] = value
    return out


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance in units of the last bfloat16 place, elementwise; -0 and +0 are one place."""

    def place(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    assert a.dtype == b.dtype == torch.bfloat16
    return (place(a) - place(b)).abs()


def tied(trio: Path, tensor: str, density: float) -> torch.Tensor:
    """Where some |δ| equals its trim threshold: mergekit's choice there is arbitrary."""
    base = tensors(trio / "base")[tensor].float()
    out = torch.zeros(base.shape, dtype=torch.bool)
    for i in range(EXPERTS):
        size = (tensors(trio / f"expert_{i:02d}")[tensor].float() - base).abs()
        kept = trim_keep(size.flatten().double().numpy(), density)
        out |= size == size.flatten()[torch.from_numpy(np.asarray(kept))].min()
    return out


def assert_equal_up_to_ties(name: str, trio: Path, ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    total = equal = 0
    for tensor, value in ours.items():
        distance = ulps(value, theirs[tensor])
        if name.startswith("ties"):
            density = {"ties": 0.2, "ties-sum": 0.6}.get(name, 0.5 if "attn" in tensor else 0.3)
            distance = distance[~tied(trio, tensor, density)]
        assert int(distance.max() if distance.numel() else 0) <= 1, tensor
        total += distance.numel()
        equal += int((distance == 0).sum())
    assert equal / total >= 0.999


@pytest.mark.parametrize("name", RECIPES)
def test_the_result_equals_the_recorded_one_of_mergekit(
    home: Warehouse, trio: Path, golden: dict[str, Tensors], name: str
) -> None:
    ours = tensors(run(home, recipe(name, trio)).snapshot.path)
    assert_equal_up_to_ties(name, trio, ours, golden[name])


def test_the_family_is_the_one_that_was_recorded(trio: Path) -> None:
    with safe_open(GOLDEN, "pt") as file:
        assert file.metadata()["family"] == family_digest(trio)


@live
@pytest.mark.peer
@pytest.mark.parametrize("name", ["linear", "task_arithmetic-lambda", "ties"])
def test_the_result_equals_what_mergekit_makes_now(home: Warehouse, trio: Path, name: str) -> None:
    text = recipe(name, trio)
    ours = tensors(run(home, text).snapshot.path)
    assert_equal_up_to_ties(name, trio, ours, run_mergekit(text))


def _dare(trio: Path, method: str, seed: int) -> str:
    text = recipe("task_arithmetic", trio, extra=f"seed: {seed}").replace(
        "out_dtype: bfloat16\n", ""
    )
    return text.replace("task_arithmetic", method) + "parameters: {density: 0.4}\n"


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_keeps_its_density_and_rescales_by_l1(
    home: Warehouse, trio: Path, method: str
) -> None:
    """One expert: the merge shows its sparsified delta directly."""
    text = _dare(trio, method, 0)
    lines = text.splitlines()
    alone = "\n".join(line for i, line in enumerate(lines) if not 5 <= i <= 8) + "\n"
    merged = tensors(run(home, alone).snapshot.path)
    base, expert = tensors(trio / "base"), tensors(trio / "expert_00")
    for tensor, value in merged.items():
        delta = expert[tensor].double() - base[tensor].double()
        kept = value.double() - base[tensor].double()
        there = delta != 0
        n = int(there.sum())
        share = float((kept[there].abs() > 1e-9).double().mean())
        assert abs(share - 0.4) < 5 * (0.24 / n) ** 0.5 + 1e-9, tensor
        assert float(kept.abs().sum()) == pytest.approx(float(delta.abs().sum()), rel=1e-3)


def test_dare_has_the_expectation_of_the_undropped_merge(home: Warehouse, trio: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    plain_text = _dare(trio, "dare_linear", 0).replace("density: 0.4", "density: 1.0")
    plain = tensors(run(home, plain_text).snapshot.path)[name]
    base = tensors(trio / "base")[name].double()
    seeds = 12
    total = torch.zeros_like(base)
    for seed in range(seeds):
        total += tensors(run(home, _dare(trio, "dare_linear", seed)).snapshot.path)[name].double()
    update, mean = plain.double() - base, total / seeds - base
    slope = float((mean * update).sum() / update.square().sum())
    assert slope == pytest.approx(1.0, abs=0.02)


@live
@pytest.mark.peer
def test_dare_updates_are_as_large_as_mergekits(home: Warehouse, trio: Path) -> None:
    text = _dare(trio, "dare_linear", 3)
    mergekit_text = text.replace("seed: 3\n", "")
    ours, theirs = tensors(run(home, text).snapshot.path), run_mergekit(mergekit_text)
    base = tensors(trio / "base")
    for tensor, value in ours.items():
        if value.numel() < 4096:
            continue
        a = (value.double() - base[tensor].double()).norm()
        b = (theirs[tensor].double() - base[tensor].double()).norm()
        assert float(a) == pytest.approx(float(b), rel=0.05), tensor


def test_the_lowest_index_wins_among_ties_at_the_threshold(home: Warehouse, tmp_path: Path) -> None:
    from tests.support.family import tensors_of, write_model

    base = tensors_of(0, None)
    name = "model.layers.0.mlp.up_proj.weight"
    expert = {n: t.clone() for n, t in base.items()}
    flat = torch.zeros(base[name].numel())
    base[name] = torch.zeros_like(base[name])
    flat[100:300] = 1.0
    expert[name] = flat.to(torch.bfloat16).view(base[name].shape)
    write_model(tmp_path / "base", base)
    write_model(tmp_path / "expert", expert)
    keep = 120 / flat.numel()
    merged = tensors(
        run(
            home,
            (
                f"merge_method: ties\nbase_model: {tmp_path / 'base'}\nmodels:\n"
                f"  - model: {tmp_path / 'expert'}\n    parameters: {{weight: 1, density: "
                f"[{{filter: layers.0.mlp.up_proj, value: {keep + 1e-9}}}, {{value: 1.0}}]}}\n"
            ),
        ).snapshot.path
    )
    kept = merged[name].flatten().nonzero().flatten()
    assert kept.tolist() == list(range(100, 220))
