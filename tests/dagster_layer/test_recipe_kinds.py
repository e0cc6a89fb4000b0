"""Every kind of recipe through Dagster: its graph, what triggers it, and what its assets tell."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.assets.metadata import description
from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, records_of
from tests.dagster_layer.test_experts import jobs, merged, remerged, sum_of
from tests.resolution.test_token_rows import write as write_with_tokenizer
from tests.support import architectures
from tests.support.family import tensors_of, write_model
from tests.tokenizer.test_mergekit import word_family

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

STACK = """\
merge_method: passthrough
slices:
- sources: [{model: expert_00, layer_range: [0, 2]}]
- sources: [{model: expert_01, layer_range: [0, 2]}]
- sources: [{model: expert_00, layer_range: [1, 2]}]
"""
MODULES = """\
merge_method: linear
modules:
  text_decoder:
    slices:
    - sources: [{model: one, layer_range: [0, 2]}, {model: two, layer_range: [0, 2]}]
  vision_tower:
    slices:
    - sources: [{model: two, layer_range: [0, 3]}]
parameters: {weight: 1}
"""
STAGES = """\
name: skills
merge_method: ties
base_model: base
models:
- {model: expert_00, parameters: {weight: 1.0, density: 0.4}}
- {model: expert_01, parameters: {weight: 1.0, density: 0.4}}
---
name: more
merge_method: task_arithmetic
base_model: base
models:
- {model: skills, parameters: {weight: 0.7}}
- {model: expert_02, parameters: {weight: 0.3}}
---
merge_method: slerp
base_model: expert_03
models: [{model: more}]
parameters: {t: 0.5}
"""
UNION = """\
merge_method: task_arithmetic
base_model: A
tokenizer: {source: union}
models:
- {model: B, parameters: {weight: 0.5}}
- {model: C, parameters: {weight: 0.5}}
"""
LINEAR = "merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: base}, {model: expert}]\n"
#: A recipe that cannot be used, a part of what it is told, and what mends it.
UNUSABLE = {
    "bad_yaml": ("merge_method: [linear\n", "not valid YAML"),
    "unknown_method": (LINEAR.replace("linear", "linaer"), "did you mean `linear`"),
    "missing_model": (LINEAR.replace("expert", "lost"), "lost is not registered yet"),
    "a_list": ("- linear\n", "a recipe is a mapping"),
    "no_layer_9": (
        "merge_method: passthrough\nslices: [{sources: [{model: base, layer_range: [0, 9]}]}]\n",
        "layer_range",
    ),
}

#: Assets that are there without any recipe.
OF_THE_WAREHOUSE = ("expert_index", "free_space", "pipeline_status")


def change(file: Path, wanted: str) -> None:
    """Add to all tensors whose names match."""
    tensors = load_file(file)
    assert any(re.search(wanted, name) for name in tensors)
    for name, value in tensors.items():
        if re.search(wanted, name):
            tensors[name] = value + torch.full_like(value, 0.01)
    save_file(tensors, file, metadata={"format": "pt"})


def told(
    instance: dg.DagsterInstance, recipe: str, asset: str, layer: str | None = None
) -> dict[str, Any]:
    """The metadata of what an asset, or the partition of a layer, was last materialised as."""
    wanted = dg.AssetRecordsFilter(
        dg.AssetKey([recipe, asset]), asset_partitions=None if layer is None else [layer]
    )
    (record,) = instance.fetch_materializations(wanted, limit=1).records
    assert record.asset_materialization is not None
    return {k: v.value for k, v in record.asset_materialization.metadata.items()}


def layer_assets(home: Warehouse, recipe: str) -> list[str]:
    layers = build_definitions(home).resolve_asset_graph().get(dg.AssetKey([recipe, "layers"]))
    assert layers.partitions_def is not None
    return sorted(layers.partitions_def.get_partition_keys())


def snapshots(home: Warehouse) -> set[str]:
    return {p.name for p in home.snapshots.iterdir()}


def test_a_stack_shows_the_layers_of_its_output_and_what_each_is_made_from(
    home: Warehouse, ticker: Ticker, drop: Drop, instance: dg.DagsterInstance
) -> None:
    for name in ("expert_00", "expert_01"):
        drop(name)
    home.recipe_path("stack").write_text(STACK)
    runs = ticker.tick()
    assert jobs(runs) == ["expert_00", "expert_01", "merge_stack"]
    shown = ["00", "01", "02", "03", "04", "embed", "head"]
    assert layer_assets(home, "stack") == sorted(runs[-1]["layers_reused"]) == shown
    made_from = {layer: told(instance, "stack", "layers", layer)["made from"] for layer in shown}
    assert made_from["01"] == made_from["04"] == "expert_00 layer.01"
    assert made_from["03"] == "expert_01 layer.01"
    change(home.inbox / "expert_00" / "model.safetensors", r"layers\.1\.mlp\.up_proj")
    runs = ticker.tick()
    assert jobs(runs) == ["expert_00", "merge_stack"]
    assert remerged(runs[1]) == {"01", "04"}


def test_modules_show_the_layers_of_their_deepest_stack(
    home: Warehouse, ticker: Ticker, instance: dg.DagsterInstance
) -> None:
    for expert, name in enumerate(("one", "two")):
        text = {n.replace("model.", "model.language_model."): v for n, v in _tensors(expert)}
        names = [f"model.visual.blocks.{i}.mlp.weight" for i in range(3)]
        sight = {n: torch.full((4, 4), float(expert)) for n in names}
        write_model(home.inbox / name, text | sight)
    home.recipe_path("sees").write_text(MODULES)
    assert jobs(ticker.tick()) == ["one", "two", "merge_sees"]
    assert layer_assets(home, "sees") == ["00", "01", "02", "embed", "head"]
    assert told(instance, "sees", "layers", "02")["made from"] == "two layer.02"
    assert told(instance, "sees", "layers", "00")["tensors"] == 10
    change(home.inbox / "two" / "model.safetensors", r"visual\.blocks\.2")
    runs = ticker.tick()
    assert jobs(runs) == ["two", "merge_sees"]
    assert remerged(runs[1]) == {"02"}


def _tensors(expert: int) -> list[tuple[str, torch.Tensor]]:
    return list(tensors_of(0, expert).items())


def test_what_only_the_first_stage_uses_reaches_the_release_and_no_stage_is_released(
    home: Warehouse, ticker: Ticker, drop: Drop, instance: dg.DagsterInstance
) -> None:
    names = ["base", "expert_00", "expert_01", "expert_02", "expert_03"]
    for name in names:
        drop(name)
    home.recipe_path("all").write_text(STAGES)
    assert jobs(ticker.tick()) == [*names, "merge_all"]
    assert len(snapshots(home)) == 3
    assert home.refs.names() == ["all"]
    keys = build_definitions(home).resolve_asset_graph().get_all_asset_keys()
    assert {k.path[0] for k in keys} == {*OF_THE_WAREHOUSE, "all"}
    plan = told(instance, "all", "plan")
    more = {"stage": "more", "method": "task_arithmetic", "models": "skills, expert_02, base"}
    assert more in records_of(plan["stages"])
    (stage,) = (row for row in records_of(plan["inputs"]) if row["name"] == "more")
    assert stage["role"] == "expert"
    assert str(stage["path"]).startswith(str(home.snapshots))
    before = merged(home, "all")
    change(home.inbox / "expert_00" / "model.safetensors", r"layers\.1\.mlp\.up_proj")
    runs = ticker.tick()
    assert jobs(runs) == ["expert_00", "merge_all"]
    assert remerged(runs[1]) == {"01"}
    after = merged(home, "all")
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {"model.layers.1.mlp.up_proj.weight"}
    made = snapshots(home)
    assert len(made) == 6
    assert ticker.tick() == []
    assert snapshots(home) == made


def test_an_edit_of_the_first_stage_alone_reaches_the_release(
    home: Warehouse, ticker: Ticker, drop: Drop
) -> None:
    for name in ("base", "expert_00", "expert_01", "expert_02", "expert_03"):
        drop(name)
    home.recipe_path("all").write_text(STAGES)
    ticker.tick()
    home.recipe_path("all").write_text(STAGES.replace("weight: 1.0", "weight: 0.5", 1))
    assert jobs(ticker.tick()) == ["merge_all"]
    assert [r.number for r in history(home, "all")] == [1, 2]


def test_what_auto_chose_is_counted_and_given_reasons(
    home: Warehouse, ticker: Ticker, drop: Drop, instance: dg.DagsterInstance
) -> None:
    for name in ("base", "expert_00", "expert_01"):
        drop(name)
    home.recipe_path("own").write_text(
        sum_of("base", "expert_00", "expert_01").replace("task_arithmetic", "auto")
    )
    assert jobs(ticker.tick())[-1] == "merge_own"
    folder = home.snapshots / history(home, "own")[-1].snapshot_id
    choices = json.loads((folder / "provenance.json").read_text())["choices"]
    assert choices.keys() == merged(home, "own").keys()
    counts = Counter(operator for operator, _ in choices.values())
    plan, snapshot = told(instance, "own", "plan"), told(instance, "own", "snapshot")
    for operator, n in counts.items():
        (row,) = (r for r in records_of(plan["operators"]) if r["operator"] == operator)
        assert row["tensors"] == str(n)
    assert snapshot["operators"] == plan["operators"]
    kinds = Counter(reason.partition(":")[0] for _, reason in choices.values())
    assert {k: v for k, v in plan.items() if k.startswith("tensors made by ")} == {
        f"tensors made by {kind}": n for kind, n in kinds.items()
    }
    assert f"… and {len(choices) - 8} more" in str(records_of(plan["choices"])[-1])
    per_layer: Counter[str] = Counter()
    for layer in layer_assets(home, "own"):
        for pair in told(instance, "own", "layers", layer)["operators"].split(", "):
            operator, _, n = pair.partition(": ")
            per_layer[operator.partition(" ")[0]] += int(n)
    assert per_layer == counts


def test_a_union_of_vocabularies_is_merged_when_all_have_landed(
    home: Warehouse, ticker: Ticker, instance: dg.DagsterInstance
) -> None:
    home.recipe_path("words").write_text(UNION)
    words: set[str] = set()
    for i, (files, rows) in enumerate(word_family(gaps=False)):
        assert ticker.tick() == []
        write_with_tokenizer(home.inbox / "ABC"[i], i, rows, files)
        tokenizer = json.loads(files["tokenizer.json"])
        words |= {*tokenizer["model"]["vocab"], *(t["content"] for t in tokenizer["added_tokens"])}
        assert jobs(ticker.tick())[0] == "ABC"[i]
    embedding = merged(home, "words")["model.embed_tokens.weight"]
    assert len(embedding) == len(words)
    assert layer_assets(home, "words") == ["00", "embed", "head"]
    assert (
        "B embed, new token rows embed" in told(instance, "words", "layers", "embed")["made from"]
    )
    assert "token-rows-" not in told(instance, "words", "plan")["experts"]


@pytest.mark.parametrize("arch", ["gpt2", "bert"])
def test_the_graph_of_another_architecture_has_its_layers(
    home: Warehouse, ticker: Ticker, tmp_path: Path, arch: str
) -> None:
    for folder in architectures.make(arch, tmp_path / arch, 2, layers=3).iterdir():
        shutil.copytree(folder, home.inbox / folder.name)
    home.recipe_path("skill").write_text(sum_of("base", "expert_00", "expert_01"))
    runs = ticker.tick()
    assert jobs(runs) == ["base", "expert_00", "expert_01", "merge_skill"]
    assert layer_assets(home, "skill") == ["00", "01", "02", "embed", "head"]
    change(home.inbox / "expert_00" / "model.safetensors", r"\.(h|layer)\.2\.")
    runs = ticker.tick()
    assert jobs(runs) == ["expert_00", "merge_skill"]
    assert remerged(runs[1]) == {"02"}


def test_unusable_recipes_say_why_while_others_run_and_run_when_mended(
    home: Warehouse, ticker: Ticker, drop: Drop
) -> None:
    drop("base")
    drop("expert", "expert_00")
    home.recipe_path("good").write_text(LINEAR)
    for name, (text, _) in UNUSABLE.items():
        home.recipe_path(name).write_text(text)
    assert jobs(ticker.tick()) == ["base", "expert", "merge_good"]
    graph = build_definitions(home).resolve_asset_graph()
    reasons = ticker.reasons()[1]
    for name, (_, message) in UNUSABLE.items():
        node = graph.get(dg.AssetKey([name, "plan"]))
        assert description(message) in (node.description or "")
        assert message in reasons
        assert node.kinds == {"problem"}
        home.recipe_path(name).write_text(LINEAR)
    assert jobs(ticker.tick()) == sorted(f"merge_{name}" for name in UNUSABLE)


def test_a_warehouse_of_unusable_recipes_alone_says_why(home: Warehouse, ticker: Ticker) -> None:
    home.recipe_path("an odd name").write_text(LINEAR)
    home.recipe_path("lost").symlink_to("gone")
    assert ticker.tick() == []
    assert re.search(r"cannot name assets.*\n.*cannot be read", ticker.reasons()[1])
    keys = build_definitions(home).resolve_asset_graph().get_all_asset_keys()
    assert {k.path[0] for k in keys} == {*OF_THE_WAREHOUSE, "an odd name.yml", "lost"}


def test_files_whose_names_clash_or_name_no_asset_leave_other_recipes_alone(
    home: Warehouse, ticker: Ticker, drop: Drop
) -> None:
    drop("base")
    drop("expert", "expert_00")
    odd = ("a b.yml", "a b.yaml", "ü.yml", "ö.yml", f"{'x' * 64}.yml")
    same = ("a-b.yml", "a.b.yml", "a_b.yaml", "a_b.yml", "a_b.yml.yml")
    for name in (*odd, *same):
        (home.recipes / name).write_text(LINEAR)
    assert jobs(ticker.tick()) == ["base", "expert", "merge_a_b"]
    assert home.refs.names() == ["a-b"]
    keys = build_definitions(home).resolve_asset_graph().get_all_asset_keys()
    assert {k.path[0] for k in keys} == {*OF_THE_WAREHOUSE, "a-b", *odd, *same[1:]}
    assert ticker.reasons()[1].count("same assets or job as a-b.yml") == 3


def test_a_recipe_that_only_its_run_finds_unusable_fails_with_the_reason_and_runs_when_mended(
    home: Warehouse, ticker: Ticker
) -> None:
    for i, (files, rows) in enumerate(word_family(gaps=False)):
        write_with_tokenizer(home.inbox / "ABC"[i], i, rows, files)
    rule = "{w1: {source: {kind: model_token, model: B, token: nowhere}, force: true}}"
    home.recipe_path("bad").write_text(UNION.replace("union", f"union, tokens: {rule}"))
    home.recipe_path("good").write_text(UNION)
    runs = ticker.tick()
    assert [r["success"] for r in runs] == [True] * 3 + [False, True]
    assert "lacks the token" in runs[3]["error"]
    assert ticker.tick() == []
    home.recipe_path("bad").write_text(UNION)
    assert jobs(ticker.tick()) == ["merge_bad"]
