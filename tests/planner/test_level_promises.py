"""What a plan over packs says of its error, against merges of real checkpoints with real packs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mergepipe_pipeline.domain.plan import ExpertInput, MergePlan
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage.forms import record_of
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import tensors
from tests.planner.test_promises import ROUNDING, distance
from tests.support.family import Size, tensors_of, write_model

#: The embedding is two chunks and a part of one; all other tensors are less than one.
SIZES: Size = {"layers": 1, "hidden": 64, "vocab": 2100}
N_EXPERTS, UNPACKED = 4, 3
METHODS = (
    *("task_arithmetic", "ties", "dare_linear", "ties", "linear", "breadcrumbs", "dare_ties"),
    "ram",
)
SUMS = ("task_arithmetic", "dare_linear", "linear")
OTHERS = ("della", "sce", "slerp", "auto")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Warehouse:
    """A base and experts that agree in part, all but one of them packed; read-only."""
    folder = tmp_path_factory.mktemp("models")
    warehouse = Warehouse.at(tmp_path_factory.mktemp("packs")).ensure()
    rng = np.random.default_rng(5)
    base = {n: v.float() for n, v in tensors_of(0, None, **SIZES).items()}
    write_model(folder / "base", {n: v.bfloat16() for n, v in base.items()}, **SIZES)
    register(warehouse, folder / "base", "base", None)
    common = {n: rng.standard_normal(v.shape) for n, v in base.items()}
    for e, share in enumerate((0.9, 0.4, -0.7, 0.0)):
        changed = {}
        for n, v in base.items():
            delta = share * common[n] + (1 - share**2) ** 0.5 * rng.standard_t(4, v.shape)
            size = np.exp(rng.normal(0, 0.7)) * (e > 1 or "up_proj" not in n)
            changed[n] = (v + 0.002 * size * torch.from_numpy(delta).float()).bfloat16()
        write_model(folder / f"e{e}", changed, **SIZES)
        register(warehouse, folder / f"e{e}", f"e{e}", "base")
    pack(warehouse, [f"e{e}" for e in range(N_EXPERTS) if e != UNPACKED])
    return warehouse


def recipe(
    method: str, experts: list[int], params: dict[str, object], **own: float
) -> ParsedRecipe:
    rows = [f"- {{model: e{e}, parameters: {json.dumps(own)}}}" for e in experts]
    lines = [f"merge_method: {method}", "base_model: base", "models:", *rows]
    text = "\n".join([*lines, f"parameters: {json.dumps(params)}", "out_dtype: float32", ""])
    return parse(text, name="levels", where="levels")


def inputs_of(plan: MergePlan) -> list[ExpertInput]:
    return [e for layer in plan.layers for task in layer.tasks for e in task.experts]


def drawn(seed: int) -> tuple[str, ParsedRecipe, str]:
    """Method, recipe and budget."""
    rng = np.random.default_rng([13, seed])
    method = METHODS[seed % len(METHODS)]
    experts = rng.permutation(N_EXPERTS)[: rng.integers(2, N_EXPERTS + 1)].tolist()
    params: dict[str, object] = {"normalize": bool(rng.random() < 0.5)} if method != "ram" else {}
    own = {} if method == "ram" else {"weight": float(rng.uniform(0.2, 1.0))}
    if method not in ("linear", "task_arithmetic", "ram"):
        own["density"] = float(rng.choice([0.2, 0.5, 0.8]))
    return method, recipe(method, experts, params, **own), f"{rng.choice([2, 6, 12, 25, 40])}%"


@pytest.mark.parametrize("seed", range(10))
def test_a_merge_from_packs_errs_as_its_plan_predicts_and_never_more_than_its_bound(
    home: Warehouse, seed: int
) -> None:
    method, raw, budget = drawn(seed)
    full = tensors(run_plan(home, make_plan(home, raw, no_packs=True)).snapshot.path)
    outcome = run_plan(home, make_plan(home, raw, budget=budget), fresh=True)
    found, told = outcome.plan.estimates, outcome.summary()
    assert told["expert_bytes_read"] == found.expert_bytes_planned <= (found.budget_bytes or 0)
    assert found.strategy == "packs"
    error = distance(tensors(outcome.snapshot.path), full)
    noise = ROUNDING * distance(full, {n: v.new_zeros(()) for n, v in full.items()})
    assert found.error_bound is not None
    assert error <= found.error_bound + noise
    assert found.predicted_error is not None
    if method in SUMS:
        assert found.predicted_error == pytest.approx(error, rel=0.1)
    # Votes and trims are tried on 64 elements of each block: near, without a promise how near.
    assert error / 2 <= found.predicted_error <= error * 2
    assert record_of(MergePlan, json.loads(outcome.plan.to_json())) == outcome.plan


@pytest.mark.parametrize("method", [*dict.fromkeys(METHODS), *OTHERS])
def test_a_plan_that_reads_all_of_the_packs_has_the_ids_of_the_merge_without_them(
    home: Warehouse, method: str
) -> None:
    own: dict[str, float] = {"density": 0.5} if method[:2] in ("ti", "da", "br", "de", "au") else {}
    own |= {} if method in ("ram", "sce", "slerp") else {"weight": 0.5}
    params: dict[str, object] = {"t": 0.4} if method == "slerp" else {}
    raw = recipe(method, [0] if method == "slerp" else [0, 1, UNPACKED], params, **own)
    plain = make_plan(home, raw, no_packs=True)
    for block_elems in (4096, 1 << 17):
        full = make_plan(home, raw, block_elems=block_elems)
        assert full.plan_id == plain.plan_id
        assert full.estimates.expert_bytes_planned < plain.estimates.expert_bytes_planned
        assert full.packs
        assert not plain.packs
    assert are_approximated(make_plan(home, raw, budget="5%")) == (method != "sce")


def are_approximated(plan: MergePlan) -> bool:
    return any(e.packed.approximate for e in inputs_of(plan) if e.packed)


def test_sce_approximates_for_who_asks_for_packs_by_name(home: Warehouse) -> None:
    raw = recipe("sce", [0, 1, 2], {"select_topk": 0.5})
    assert not are_approximated(make_plan(home, raw, budget="5%"))
    assert are_approximated(make_plan(home, raw, budget="5%", strategy="packs"))


#: By rows or ranks, with the parameters of each expert.
BY_RANK: dict[str, tuple[dict[str, object], dict[str, float]]] = {
    "della": ({}, {"weight": 0.5, "density": 0.5, "epsilon": 0.1}),
    "della_linear": ({}, {"weight": 0.5, "density": 0.5, "epsilon": 0.1}),
    "nuslerp": ({"nuslerp_flatten": False}, {"weight": 0.5}),
    "model_stock": ({"filter_wise": True}, {}),
    "ram": ({}, {}),
}


@pytest.mark.parametrize("method", BY_RANK)
def test_methods_that_rank_come_nearer_to_the_full_merge_from_packs_than_from_blocks(
    home: Warehouse, method: str
) -> None:
    params, own = BY_RANK[method]
    raw = recipe(method, [0, 1] if method == "nuslerp" else [0, 1, 2], params, **own)
    full = tensors(run_plan(home, make_plan(home, raw, no_packs=True)).snapshot.path)
    errors = {}
    for strategy in ("packs", "magnitude"):
        plan = make_plan(home, raw, budget="25%", strategy=strategy)
        found = tensors(run_plan(home, plan, fresh=True).snapshot.path)
        errors[strategy] = distance(found, full)
        told = plan.estimates
        assert (told.error_bound is None) == (method != "ram")
        says = "as they are read" in told.bound_note
        assert says == (strategy == "packs" and method != "ram")
        assert are_approximated(plan) == (strategy == "packs")
        # Samples are no rows: what norms or angles of rows decide is only guessed.
        assert told.predicted_error is not None
        if method not in ("nuslerp", "model_stock"):
            assert errors[strategy] / 2 <= told.predicted_error <= 2 * errors[strategy]
    assert errors["packs"] < 0.8 * errors["magnitude"]


def test_ties_that_keep_a_fifth_are_exact_from_the_packs_first_part(home: Warehouse) -> None:
    for density, levels in ((0.2, {"X20"}), (0.19, {"X20"}), (0.21, {"X"})):
        raw = recipe("ties", [0, 1, 2], {}, weight=1.0, density=density)
        plan, plain = make_plan(home, raw), make_plan(home, raw, no_packs=True)
        assert plan.plan_id == plain.plan_id
        read = [r for e in inputs_of(plan) if e.packed for r in e.packed.ranges]
        large = [r for r in read if r.stop_elem - r.start_elem > 60_000]
        assert {r.level for r in large} == levels
        assert all(r.is_exact for r in read)
        from_packs, stored = (
            tensors(run_plan(home, p, fresh=True).snapshot.path) for p in (plan, plain)
        )
        assert all(torch.equal(from_packs[n], v) for n, v in stored.items())


def test_an_error_is_promised_from_packs_with_fewer_bytes_than_without(home: Warehouse) -> None:
    raw = recipe("task_arithmetic", [0, 1, 2], {}, weight=0.4)
    with_packs = make_plan(home, raw, budget="error=20%").estimates
    without = make_plan(home, raw, budget="error=20%", no_packs=True).estimates
    assert with_packs.error_bound is not None
    assert with_packs.update_norm is not None
    assert with_packs.error_bound <= 0.2 * with_packs.update_norm
    assert with_packs.expert_bytes_planned < 0.5 * without.expert_bytes_planned
    # Approximated votes promise nothing, so all that is read is exact.
    votes = make_plan(home, recipe("ties", [0, 1], {}, weight=1.0, density=0.5), budget="error=20%")
    assert all(r.is_exact for e in inputs_of(votes) if e.packed for r in e.packed.ranges)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
@pytest.mark.parametrize("share", [0, 20_000, 1 << 30])
def test_a_promised_error_leaves_every_expert_within_its_share(
    home: Warehouse, method: str, share: int
) -> None:
    raw = recipe(method, [0, 1], {}, weight=0.5)
    text = f"{raw.text}budget: {{error: 95%, shares: {{e1: {share}}}}}\n"
    try:
        plan = make_plan(home, parse(text, name="levels", where="levels"))
    except BudgetError:
        assert share < 1 << 30
    else:
        assert sum(e.read_nbytes for e in inputs_of(plan) if e.position == 1) <= share
        bound, update = plan.estimates.error_bound, plan.estimates.update_norm
        assert bound is not None
        assert update is not None
        assert bound <= 0.95 * update


def test_a_named_strategy_reads_the_experts_themselves(home: Warehouse) -> None:
    raw = recipe("task_arithmetic", [0, 1, 2], {}, weight=0.4)
    plan = make_plan(home, raw, budget="25%", strategy="magnitude")
    assert plan.estimates.strategy == "magnitude"
    assert not any(e.packed for e in inputs_of(plan))
    without = make_plan(home, raw, budget="25%", strategy="magnitude", no_packs=True)
    assert plan.plan_id == without.plan_id
    unpacked = recipe("task_arithmetic", [UNPACKED], {}, weight=0.4)
    named = make_plan(home, unpacked, budget="25%", strategy="packs").estimates
    assert named.strategy == "magnitude"
