"""An adapter on an expert leaves most tensors as they are: the expert's pack serves these."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.verbs.check import estimates_of_recipe
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replay import replay
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.architectures import HIDDEN, INNER, MOE_EXPERTS, make
from tests.support.family import tensors_of, write_adapter, write_model

#: What `write_adapter` changes.
CHANGED = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def packed(tmp_path: Path) -> Warehouse:
    """A base, two packed experts of it, of which one has other names, and an adapter."""
    warehouse = Warehouse.at(tmp_path / "home").ensure()
    for number, name in ((None, "base"), (0, "e0"), (1, "e1")):
        tensors = tensors_of(0, number, hidden=128)
        if name == "e1":
            tensors = {n.removeprefix("model."): t for n, t in tensors.items()}
        folder = write_model(tmp_path / name, tensors, hidden=128)
        register(warehouse, folder, name, None if name == "base" else "base")
    register(warehouse, write_adapter(tmp_path / "style", 3, hidden=128), "style", "base")
    pack(warehouse, ["e0", "e1"])
    return warehouse


def text_of(expert: str, extra: str = "", base: str = "base") -> str:
    other = "e1" if expert.startswith("e0") else "e0"
    return (
        f"merge_method: ties\nbase_model: {base}\nmodels: [{{model: {expert}}}, {{model: {other}}}]"
        f"\nparameters: {{weight: 0.5, density: 0.5}}\n{extra}"
    )


def served_of(plan: MergePlan, expert: str) -> set[str]:
    """The tensors of an expert that come from its pack."""
    return {
        task.name
        for layer in plan.layers
        for task in layer.tasks
        for e in task.experts
        if e.packed and plan.sources[e.view.stored[0].source].name == expert
    }


@pytest.mark.parametrize("expert", ["e0", "e1"])
def test_tensors_that_an_adapter_leaves_alone_are_read_from_the_pack_below(
    packed: Warehouse, expert: str
) -> None:
    parsed = parse(text_of(f"{expert}+style", "budget: 30%\n"), name="r", where="r.yml")
    served = served_of(make_plan(packed, parsed), expert)
    assert served
    assert CHANGED not in served


@pytest.mark.parametrize("expert", ["e0", "e1"])
def test_an_exact_merge_with_an_adapter_has_the_same_bits_with_packs(
    packed: Warehouse, expert: str
) -> None:
    exact = parse(text_of(f"{expert}+style"), name="x", where="x.yml")
    found = merge(packed, exact).outcome
    assert served_of(found.plan, expert)
    beside = merge(packed, exact, no_packs=True, fresh=True).outcome
    assert found.snapshot.snapshot_id == beside.snapshot.snapshot_id
    assert not beside.plan.packs


@pytest.mark.parametrize(
    ("expert", "base", "extra"),
    [
        ("e0+style", "base", ""),
        ("e1+style", "base", ""),
        ("e0", "base+style", ""),
        ("e0", "base", "tokenizer_source: union\n"),
    ],
)
def test_a_merge_that_read_packs_below_an_adapter_or_a_tokenizer_is_replayed(
    packed: Warehouse, expert: str, base: str, extra: str
) -> None:
    text = text_of(expert, f"budget: 30%\n{extra}", base)
    made = merge(packed, parse(text, name="r", where="r.yml")).outcome
    assert served_of(made.plan, expert.partition("+")[0])
    again = replay(packed, made.snapshot.snapshot_id)
    assert again.snapshot_id == made.snapshot.snapshot_id


@pytest.mark.parametrize("expert", ["e0+style", "e1+style"])
def test_nobody_is_told_to_pack_what_serves_below_an_adapter(
    packed: Warehouse, expert: str
) -> None:
    parsed = parse(text_of(expert), name="r", where="r.yml")
    merge(packed, parsed)  # since only what is analysed is estimated
    assert estimates_of_recipe(packed, resolve(packed, parsed)) == ()


@pytest.mark.parametrize(
    ("base", "expert", "is_served"),
    [
        ("base", "e0+fused", True),
        ("base+fused", "e0", True),
        ("e0+fused", "base", False),
    ],
)
def test_packs_of_experts_apart_hinder_no_recipe_in_which_an_adapter_fuses_them(
    tmp_path: Path, base: str, expert: str, is_served: bool
) -> None:
    warehouse = Warehouse.at(tmp_path / "home").ensure()
    family = make("mixtral", tmp_path, 2, layers=1)
    for folder, name in (("base", "base"), ("expert_00", "e0"), ("expert_01", "e1")):
        register(warehouse, family / folder, name, None if name == "base" else "base")
    register(warehouse, write_fused_adapter(tmp_path / "fused"), "fused", "base")
    pack(warehouse, ["e0", "e1"])
    text = (
        f"merge_method: ties\nbase_model: {base}\nmodels: [{{model: {expert}}}, {{model: e1}}]\n"
        "parameters: {weight: 0.5, density: 0.5}\n"
    )
    parsed = parse(text, name="moe", where="moe.yml")
    beside = merge(warehouse, parsed, no_packs=True).outcome.snapshot.snapshot_id
    assert merge(warehouse, parsed, fresh=True).outcome.snapshot.snapshot_id == beside
    found = merge(warehouse, parse(f"{text}budget: 30%\n", name="moe", where="moe.yml")).outcome
    assert bool(found.plan.packs) is is_served
    again = replay(warehouse, found.snapshot.snapshot_id)
    assert again.snapshot_id == found.snapshot.snapshot_id


def write_fused_adapter(folder: Path, rank: int = 2) -> Path:
    """A PEFT adapter of the first layer's experts as one parameter, as transformers 5 has them."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": []}
    config["target_parameters"] = ["mlp.experts.down_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    stem = "base_model.model.model.layers.0.mlp.experts"
    draw = torch.Generator().manual_seed(0)
    factors = {  # [ranks of all experts, inner], [hidden, ranks of all experts]
        f"{stem}.lora_A.weight": torch.randn(MOE_EXPERTS * rank, INNER, generator=draw),
        f"{stem}.lora_B.weight": torch.randn(HIDDEN, MOE_EXPERTS * rank, generator=draw),
    }
    save_file(factors, folder / "adapter_model.safetensors")
    return folder
