"""Packs serve a recipe with a tokenizer, too: all but the tensors that it gives other rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import tensors_of, write_model


@pytest.fixture
def packed(tmp_path: Path) -> Warehouse:
    """A base and two packed experts, one with a token of its own."""
    warehouse = Warehouse.at(tmp_path / "home").ensure()
    for number, name in ((None, "base"), (0, "e0"), (1, "e1")):
        folder = write_model(tmp_path / name, tensors_of(0, number, hidden=128), hidden=128)
        if name == "e0":
            text = (folder / "tokenizer.json").read_text()
            (folder / "tokenizer.json").write_text(text.replace('"w7": 7', '"own": 7'))
        register(warehouse, folder, name, None if name == "base" else "base")
    pack(warehouse)
    return warehouse


def text_of(extra: str) -> str:
    return (
        "merge_method: ties\nbase_model: base\nmodels: [{model: e0}, {model: e1}]\n"
        f"parameters: {{weight: 0.5, density: 0.5}}\n{extra}"
    )


def packed_tensors(plan: MergePlan) -> set[str]:
    tasks = [task for layer in plan.layers for task in layer.tasks]
    return {t.name for t in tasks if any(e.packed for e in t.experts)}


@pytest.mark.parametrize("source", ["base", "union"])
def test_packs_are_read_beside_another_tokenizer_with_the_bits_of_the_originals(
    packed: Warehouse, source: str
) -> None:
    def plan(extra: str) -> MergePlan:
        parsed = parse(text_of(f"budget: 20%\n{extra}"), name="r", where="r.yml")
        return make_plan(packed, parsed)

    plain, with_tokens = plan(""), plan(f"tokenizer_source: {source}\n")
    assert packed_tensors(plain)
    lost = packed_tensors(plain) - packed_tensors(with_tokens)
    assert not {name for name in lost if "embed" not in name and "lm_head" not in name}
    exact = parse(text_of(f"tokenizer_source: {source}\n"), name="x", where="x.yml")
    found = merge(packed, exact).outcome
    beside = merge(packed, exact, no_packs=True, fresh=True).outcome
    assert found.snapshot.snapshot_id == beside.snapshot.snapshot_id
    assert not beside.plan.packs
