"""An adapter on an expert leaves most tensors as they are: the expert's pack serves these."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.family import tensors_of, write_adapter, write_model

#: What `write_adapter` changes.
CHANGED = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def packed(tmp_path: Path) -> Warehouse:
    """A base, two packed experts of it, and an adapter."""
    warehouse = Warehouse.at(tmp_path / "home").ensure()
    for number, name in ((None, "base"), (0, "e0"), (1, "e1")):
        folder = write_model(tmp_path / name, tensors_of(0, number, hidden=128), hidden=128)
        register(warehouse, folder, name, None if name == "base" else "base")
    register(warehouse, write_adapter(tmp_path / "style", 3, hidden=128), "style", "base")
    pack(warehouse, ["e0", "e1"])
    return warehouse


def text_of(extra: str) -> str:
    return (
        "merge_method: ties\nbase_model: base\nmodels: [{model: e0+style}, {model: e1}]\n"
        f"parameters: {{weight: 0.5, density: 0.5}}\n{extra}"
    )


def served_of_adapted(plan: MergePlan) -> set[str]:
    """The tensors of the expert below the adapter that come from its pack."""
    return {
        task.name
        for layer in plan.layers
        for task in layer.tasks
        for e in task.experts
        if e.packed and plan.sources[e.view.stored[0].source].name == "e0"
    }


def test_tensors_that_an_adapter_leaves_alone_are_read_from_the_pack_below(
    packed: Warehouse,
) -> None:
    plan = make_plan(packed, parse(text_of("budget: 30%\n"), name="r", where="r.yml"))
    served = served_of_adapted(plan)
    assert served
    assert CHANGED not in served


def test_an_exact_merge_with_an_adapter_has_the_same_bits_with_packs(packed: Warehouse) -> None:
    exact = parse(text_of(""), name="x", where="x.yml")
    found = merge(packed, exact).outcome
    assert served_of_adapted(found.plan)
    beside = merge(packed, exact, no_packs=True, fresh=True).outcome
    assert found.snapshot.snapshot_id == beside.snapshot.snapshot_id
    assert not beside.plan.packs
