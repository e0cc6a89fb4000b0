"""Every merge method through plan and engine: the oracle's tensors, its budgets, its ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.operators.steps.random import uniforms
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.support import oracles
from tests.support.family import Size, tensors_of, write_model
from tests.support.oracles import ORACLES, Bools, Case, Floats
from tests.support.oracles_spherical import ORACLES_SPHERICAL

#: Matrices of the MLP have four blocks of the smallest size.
SIZES: Size = {"layers": 1, "hidden": 64, "vocab": 192}
WEIGHTS = (1.0, 0.5, 0.75)
EXACT = "out_dtype: float32"
#: Methods that choose another one have no oracle of their own.
METHODS = [name for name, operator in OPERATORS.items() if operator.choose is None]
ALL = list(OPERATORS)
#: Methods on values whose factors, known from whole tensors, need not add up to 1.
SCALING = ("slerp", "karcher", "passthrough")
PARAMETERS: dict[str, dict[str, Any]] = {
    "slerp": {"t": 0.3},
    "nearswap": {"t": 0.2},
    "sce": {"select_topk": 0.5},
    "task_arithmetic": {"lambda": 0.9, "normalize": True},
    "dare_ties": {"lambda": 1.2},
}
MODEL_PARAMETERS: dict[str, float] = {"density": 0.4, "scale": 0.5, "gamma": 0.05, "epsilon": 0.1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 base and three experts of one layer, deltas a third of the weights; read-only.

    Large enough that float32 tells the divergences that arcee_fusion looks at.
    """
    folder = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)

    def normal(value: torch.Tensor) -> torch.Tensor:
        return torch.randn(value.shape, generator=generator)

    base = {n: normal(v).bfloat16() for n, v in tensors_of(0, None, **SIZES).items()}
    write_model(folder / "base", base, **SIZES)
    for i in range(3):
        expert = {n: (v + 0.3 * (1 + i / 4) * normal(v)).bfloat16() for n, v in base.items()}
        write_model(folder / f"expert_{i}", expert, **SIZES)
    return folder


def n_experts(method: str) -> int:
    return min(3, OPERATORS[method].schema.experts[1] or 3)


def model_parameters(method: str) -> list[dict[str, float]]:
    """Weights, and a density and what goes with it, for each expert."""
    names = {p.name for p in OPERATORS[method].schema.parameters if p.scope == "model"}
    given = {k: v for k, v in MODEL_PARAMETERS.items() if k in names}
    weighted = [{"weight": w} if "weight" in names else {} for w in WEIGHTS]
    return [w | given for w in weighted][: n_experts(method)]


def with_base(method: str) -> bool:
    return OPERATORS[method].schema.base != "none"


def recipe(folder: Path, method: str, *, base: bool = True, extra: str = "") -> str:
    lines = [f"merge_method: {method}", *([f"base_model: {folder / 'base'}"] if base else [])]
    lines += ["models:"]
    for i, params in enumerate(model_parameters(method)):
        lines += [f"- model: {folder / f'expert_{i}'}", f"  parameters: {json.dumps(params)}"]
    lines += [f"parameters: {json.dumps(PARAMETERS.get(method, {}))}"]
    return "\n".join([*lines, extra, ""])


def case_of(folder: Path, method: str, name: str, *, base: bool) -> Case:
    below = tensors(folder / "base")[name]
    experts = [tensors(folder / f"expert_{i}")[name] for i in range(n_experts(method))]
    return Case(
        base=below.double().flatten().numpy() if base else None,
        experts=np.stack([e.double().flatten().numpy() for e in experts]),
        params=PARAMETERS.get(method, {}),
        model_params=model_parameters(method),
        shape=tuple(below.shape),
        uniforms=np.stack(
            [uniforms(0, i, name, 0, below.numel()) / 2**32 for i in range(len(experts))]
        ),
    )


def undecided(method: str, case: Case) -> Bools:
    """Elements whose score is so near its threshold that rounding decides."""
    if method == "arcee_fusion":
        score = oracles.importance(case)
        limit = oracles.arcee_threshold(score)
        noise = 1e-6 * float(np.abs(case.deltas).max())
    elif method == "sce":
        score = case.deltas.var(axis=0)
        count = int(np.count_nonzero(score) * 0.5)
        limit, noise = float(np.sort(score)[-count]), 0.0
    else:
        return np.zeros(case.experts.shape[1], dtype=bool)
    near: Bools = np.abs(score - limit) <= 1e-5 * limit + noise
    return near


def check_oracle(folder: Path, path: str, method: str, *, base: bool) -> None:
    judge: Callable[[Case], Floats] = {**ORACLES, **ORACLES_SPHERICAL}[method]
    for name, value in tensors(path).items():
        case = case_of(folder, method, name, base=base)
        found, expected = value.double().flatten().numpy(), judge(case)
        sure = ~undecided(method, case)
        assert sure.mean() > 0.9, name
        largest = float(np.abs(case.experts).max())
        off = np.abs(found - expected)[sure]
        assert off.max() <= 1e-6 * largest, (name, float(off.max()))


@pytest.mark.parametrize("method", METHODS)
def test_whole_tensors_are_what_the_oracle_says(home: Warehouse, models: Path, method: str) -> None:
    base = with_base(method)
    exact = run(home, recipe(models, method, base=base, extra=EXACT))
    check_oracle(models, exact.snapshot.path, method, base=base)
    stored = tensors(run(home, recipe(models, method, base=base)).snapshot.path)
    for name, value in tensors(exact.snapshot.path).items():
        assert torch.equal(stored[name], value.to(torch.bfloat16)), name


@pytest.mark.parametrize("method", [m for m in METHODS if OPERATORS[m].schema.base == "optional"])
def test_methods_that_can_do_without_a_base_merge_values(
    home: Warehouse, models: Path, method: str
) -> None:
    exact = run(home, recipe(models, method, base=False, extra=EXACT))
    check_oracle(models, exact.snapshot.path, method, base=False)


@pytest.mark.parametrize("method", ALL)
def test_budgets_hold_with_errors_within_the_bound_and_nothing_read_gives_the_base(
    tmp_path: Path, models: Path, method: str
) -> None:
    base = tensors(models / "base")
    experts = sum(v.numel() * 2 for v in base.values()) * n_experts(method)
    # A method that knows no base and requires no weights takes the base as one more model.
    joined = experts // n_experts(method) if method in ("karcher", "mean") else 0
    home, text = Warehouse.at(tmp_path / "one").ensure(), recipe(models, method, extra=EXACT)
    outcomes = {budget: run(home, text, budget=budget) for budget in ("100%", "30%", "0")}
    for outcome in outcomes.values():
        s = outcome.summary()
        assert s["expert_bytes_total"] == experts + joined
        assert s["expert_bytes_read"] <= s["expert_bytes_planned"] <= s["budget_bytes"]
        if s["layers_reused"] == 0:
            assert s["expert_bytes_read"] == s["expert_bytes_planned"]
    full, part, none = (tensors(o.snapshot.path) for o in outcomes.values())
    for name, value in none.items():
        assert_base(value, base[name].float(), scaled=method in SCALING)
    estimates = outcomes["30%"].plan.estimates
    if OPERATORS[method].choose is None:
        assert estimates.expert_bytes_planned > 0.15 * experts
    if estimates.error_bound is not None:
        squared = sum(float((full[n].double() - part[n].double()).square().sum()) for n in full)
        assert 0 < squared**0.5 <= estimates.error_bound * (1 + 1e-6)
    else:
        assert estimates.bound_note
    other = Warehouse.at(tmp_path / "two").ensure()
    again = run(other, text, budget="30%", options=EngineOptions(threads=2, window_elems=500))
    assert again.snapshot.snapshot_id == outcomes["30%"].snapshot.snapshot_id


@pytest.mark.parametrize("select_topk", [0.001, 0, -1])
def test_sce_that_selects_nothing_gives_the_base(
    home: Warehouse, models: Path, select_topk: float
) -> None:
    text = recipe(models, "sce").replace("0.5}", f"{select_topk}}}")
    norm = "model.norm.weight"
    made = tensors(run(home, text).snapshot.path)[norm]
    assert torch.equal(made, tensors(models / "base")[norm])


def test_ramplus_without_a_threshold_leaves_what_nobody_changed(
    home: Warehouse, models: Path, tmp_path: Path
) -> None:
    base = tensors(models / "base")
    for name in ("same", "same_too"):
        write_model(tmp_path / name, base, **SIZES)
    text = recipe(models, "ramplus_tl")
    text = text.replace("\nparameters: {}", "\nparameters: {epsilon: 0}")
    for i, name in enumerate(("same", "same_too")):
        text = text.replace(str(models / f"expert_{i}"), str(tmp_path / name))
    expected = tensors(models / "expert_2")
    for name, value in tensors(run(home, text).snapshot.path).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("method", ["sce", "arcee_fusion", "slerp", "ramplus_tl"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_that_cannot_be_measured_is_refused_with_the_tensor(
    home: Warehouse, models: Path, tmp_path: Path, method: str, bad: float
) -> None:
    broken = tensors(models / "expert_0")
    broken["model.norm.weight"] = torch.full_like(broken["model.norm.weight"], bad)
    write_model(tmp_path / "broken", broken, **SIZES)
    text = recipe(models, method).replace(str(models / "expert_0"), str(tmp_path / "broken"))
    if method == "ramplus_tl":  # which counts changes, and NaN is none
        run(home, text)
        return
    message = r"NaN or infinity.*tensor model\.norm\.weight.*repair the model"
    with pytest.raises(OperatorError, match=message):
        run(home, text)


def assert_base(value: torch.Tensor, base: torch.Tensor, *, scaled: bool) -> None:
    """The bits of the base; or a multiple of it."""
    if not scaled:
        assert torch.equal(value, base)
        return
    factor = float(value.double().norm() / base.double().norm())
    torch.testing.assert_close(value.double(), factor * base.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", ALL)
def test_blocks_windows_and_threads_change_no_id(tmp_path: Path, models: Path, method: str) -> None:
    ids = set()
    options = [
        EngineOptions(),
        EngineOptions(threads=1, window_elems=777),
        EngineOptions(threads=3, window_elems=4097),
    ]
    text = recipe(models, method)
    for i, (given, block) in enumerate(zip(options, (None, 4096, 65536), strict=True)):
        home = Warehouse.at(tmp_path / str(i)).ensure()
        outcome = run(home, text, options=given, block_elems=block)
        ids.add((outcome.plan.plan_id, outcome.snapshot.snapshot_id))
    assert len(ids) == 1
