"""Layers taken from models and numbered anew, end to end: tensors, config, and that it loads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.errors import (
    CheckpointError,
    IncompatibleCheckpointsError,
    RecipeError,
)
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.support.family import tensors_of, write_model

SIZES = {"layers": 4, "hidden": 32, "vocab": 64}
NUMBER = re.compile(r"layers\.(\d+)\.")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two untied float32 models of four layers, `a` and `b`; `c` has six."""
    folder = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate("abc"):
        sizes = SIZES | {"layers": 6 if name == "c" else 4}
        values = tensors_of(seed, None, dtype=torch.float32, **sizes)
        torch.manual_seed(seed)
        values["lm_head.weight"] = 0.02 * torch.randn(sizes["vocab"], sizes["hidden"])
        write_model(folder / name, values, **sizes)
        change_config(folder / name, tie_word_embeddings=False)
    return folder


@pytest.mark.parametrize("kinds", [4, "abcd", {"0": "x"}, [1, 2, 3, 4], [[], [], [], []]])
def test_layer_types_that_are_no_list_of_texts_are_refused(
    home: Warehouse, pair: Path, tmp_path: Path, kinds: object
) -> None:
    shutil.copytree(pair / "a", tmp_path / "a")
    change_config(tmp_path / "a", layer_types=kinds)
    text = stacked([(tmp_path / "a", 0, 3), (tmp_path / "a", 1, 4)])
    with pytest.raises(CheckpointError, match=r"a/config\.json, layer_types.*list of texts"):
        resolve(home, parse(text, name="t", where="t"))


def test_layers_of_other_widths_are_refused(home: Warehouse, pair: Path, tmp_path: Path) -> None:
    sizes = SIZES | {"hidden": 64}
    write_model(tmp_path / "wide", tensors_of(0, None, dtype=torch.float32, **sizes), **sizes)
    text = stacked([(pair / "a", 0, 2), (tmp_path / "wide", 1, 2)])
    with pytest.raises(IncompatibleCheckpointsError, match="other shapes") as told:
        resolve(home, parse(text, name="t", where="t"))
    assert "wide, tensor model.layers.1.input_layernorm.weight" in str(told.value)
    assert "Expected [32], as in a, found [64]" in str(told.value)


def test_layers_with_tensors_that_the_config_does_not_ask_for_are_refused(
    home: Warehouse, pair: Path, tmp_path: Path
) -> None:
    biased = with_biases(pair / "a", tmp_path / "biased")
    for text in (
        stacked([(pair / "a", 0, 2), (biased, 1, 2)]),
        f"merge_method: linear\nmodels:\n{weighed(pair / 'a')}{weighed(biased)}",
    ):
        with pytest.raises(
            IncompatibleCheckpointsError, match="config of 'a' does not ask"
        ) as told:
            resolve(home, parse(text, name="t", where="t"))
        assert re.search(
            r"biased, tensor model\.layers\.\d\.self_attn\.q_proj\.bias", str(told.value)
        )


def test_layers_without_tensors_that_the_config_asks_for_are_refused(
    home: Warehouse, pair: Path, tmp_path: Path
) -> None:
    biased = with_biases(pair / "a", tmp_path / "biased")
    text = stacked([(biased, 0, 2), (pair / "b", 1, 2)])
    with pytest.raises(IncompatibleCheckpointsError, match="config of 'biased' asks for") as told:
        resolve(home, parse(text, name="t", where="t"))
    assert "b, tensor model.layers.1.self_attn.q_proj.bias" in str(told.value)


def test_a_model_of_another_class_with_more_in_its_layers_is_refused(
    home: Warehouse, pair: Path, tmp_path: Path
) -> None:
    sizes = dict(SIZES)
    values = dict(load_file(pair / "b" / "model.safetensors"))
    normed = [n for n in values if n.endswith("q_proj.weight")]
    values |= {n.replace("q_proj", "q_norm"): torch.ones(8) for n in normed}
    write_model(tmp_path / "q3", values, **sizes)
    change_config(tmp_path / "q3", model_type="qwen3", tie_word_embeddings=False)
    text = f"merge_method: linear\nmodels:\n{weighed(pair / 'a')}{weighed(tmp_path / 'q3')}"
    with pytest.raises(IncompatibleCheckpointsError, match="'a' does not ask") as told:
        resolve(home, parse(text, name="t", where="t"))
    assert "self_attn.q_norm.weight" in str(told.value)
    # A slice of a layer without them is like any other.
    values = {n: v for n, v in values.items() if "layers.1.self_attn.q_norm" not in n}
    write_model(tmp_path / "q3", values, **sizes)
    change_config(tmp_path / "q3", model_type="qwen3", tie_word_embeddings=False)
    resolve(
        home, parse(stacked([(pair / "a", 0, 2), (tmp_path / "q3", 1, 2)]), name="t", where="t")
    )
    # Of one class such tensors are left over, as scales of a cache are, and are left out.
    change_config(tmp_path / "q3", model_type="llama")
    warnings = resolve(home, parse(text, name="t", where="t")).recipe.warnings
    assert any("3 tensors that the result has not" in w for w in warnings)


@pytest.mark.parametrize("more", ["mlp.experts.0.up_proj.weight", "self_attn.indexer.wk.weight"])
def test_layers_differ_in_experts_alone_where_a_config_says_which_have_them(
    home: Warehouse, pair: Path, tmp_path: Path, more: str
) -> None:
    sizes = dict(SIZES)
    values = dict(load_file(pair / "a" / "model.safetensors"))
    said = {"tie_word_embeddings": False, "num_experts": 2, "mlp_only_layers": [0, 2, 3]}
    write_model(tmp_path / "dense", values, **sizes)
    write_model(tmp_path / "more", values | {f"model.layers.1.{more}": torch.ones(4, 4)}, **sizes)
    change_config(
        tmp_path / "dense", model_type="qwen3_moe", **said | {"mlp_only_layers": [*range(4)]}
    )
    change_config(tmp_path / "more", model_type="qwen3_moe", **said)
    text = stacked([(tmp_path / "dense", 0, 1), (tmp_path / "more", 1, 2)])
    if "experts" in more:
        resolve(home, parse(text, name="t", where="t"))
        return
    with pytest.raises(IncompatibleCheckpointsError, match="'dense' does not ask") as told:
        resolve(home, parse(text, name="t", where="t"))
    assert f"more, tensor model.layers.1.{more}" in str(told.value)


def test_a_slice_of_a_layer_beyond_those_that_the_config_counts_is_refused(
    home: Warehouse, pair: Path, tmp_path: Path
) -> None:
    shutil.copytree(pair / "a", tmp_path / "mtp")
    change_config(tmp_path / "mtp", num_hidden_layers=3)
    resolve(home, parse(stacked([(tmp_path / "mtp", 0, 3)]), name="t", where="t"))
    with pytest.raises(IncompatibleCheckpointsError, match="does not count") as told:
        resolve(home, parse(stacked([(tmp_path / "mtp", 0, 4)]), name="t", where="t"))
    assert "Expected layers 0 to 2, found layer 3" in str(told.value)


def weighed(model: Path) -> str:
    return f"- {{model: {model}, parameters: {{weight: 1}}}}\n"


def with_biases(model: Path, folder: Path) -> Path:
    """A copy of a model whose queries have a bias, as its config says."""
    sizes = dict(SIZES)
    values = dict(load_file(model / "model.safetensors"))
    for name in [n for n in values if n.endswith("q_proj.weight")]:
        values[name.replace("weight", "bias")] = torch.ones(len(values[name]))
    write_model(folder, values, **sizes)
    change_config(folder, attention_bias=True, tie_word_embeddings=False)
    return folder


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def config_of(folder: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((Path(folder) / "config.json").read_text())
    return found


def stacked(pieces: Iterable[tuple[Path, int, int]]) -> str:
    """A passthrough of (model, first layer, layer after the last)."""
    lines = ["merge_method: passthrough", "slices:"]
    lines += [f"- sources: [{{model: {m}, layer_range: [{a}, {b}]}}]" for m, a, b in pieces]
    return "\n".join([*lines, ""])


def layers_of(model: Tensors, wanted: Iterable[int], first: int) -> Tensors:
    """The tensors of these layers, numbered from `first`."""
    out = {}
    for place, number in enumerate(wanted, first):
        for name, value in model.items():
            if (found := NUMBER.search(name)) and int(found[1]) == number:
                out[NUMBER.sub(f"layers.{place}.", name)] = value
    return out


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def logits(folder: str) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        result = model(torch.tensor([[1, 7, 9]])).logits
    assert isinstance(result, torch.Tensor)
    return result


def test_overlapping_ranges_give_the_source_tensors_numbered_anew(
    home: Warehouse, pair: Path
) -> None:
    a, b = pair / "a", pair / "b"
    outcome = run(home, stacked([(a, 0, 3), (b, 1, 4), (a, 2, 4)]))
    first, second = tensors(a), tensors(b)
    expected = (
        layers_of(first, (0, 1, 2), 0)
        | layers_of(second, (1, 2, 3), 3)
        | layers_of(first, (2, 3), 6)
        | {n: v for n, v in first.items() if not NUMBER.search(n)}
    )
    assert_equal(tensors(outcome.snapshot.path), expected)
    assert config_of(outcome.snapshot.path)["num_hidden_layers"] == 8


def test_embeddings_are_the_first_slices_and_the_head_the_last_slices(
    home: Warehouse, pair: Path
) -> None:
    a, b = pair / "a", pair / "b"
    merged = tensors(run(home, stacked([(a, 0, 2), (b, 2, 4)])).snapshot.path)
    first, last = tensors(a), tensors(b)
    assert torch.equal(merged["model.embed_tokens.weight"], first["model.embed_tokens.weight"])
    assert torch.equal(merged["model.norm.weight"], last["model.norm.weight"])
    assert torch.equal(merged["lm_head.weight"], last["lm_head.weight"])


def test_a_last_slice_without_layers_gives_norm_and_head_as_in_mergekit(
    home: Warehouse, pair: Path
) -> None:
    a, b = pair / "a", pair / "b"
    outcome = run(home, stacked([(a, 0, 3), (b, 4, 4)]))
    first, last = tensors(a), tensors(b)
    ends = {n: last[n] for n in ("model.norm.weight", "lm_head.weight")}
    below = {"model.embed_tokens.weight": first["model.embed_tokens.weight"]}
    assert_equal(tensors(outcome.snapshot.path), layers_of(first, (0, 1, 2), 0) | below | ends)
    assert config_of(outcome.snapshot.path)["num_hidden_layers"] == 3
    assert any("slices[1] takes no layer" in w for w in outcome.plan.warnings)


@pytest.mark.parametrize(
    ("pieces", "place"),
    [
        ([("a", 0, 3), ("b", 3, 3), ("a", 3, 4)], r"slices\[1\]"),
        ([("a", 3, 3)], r"slices\[0\]"),
        ([("a", 0, 0), ("b", 1, 4)], r"slices\[0\]"),
        ([("a", 0, 3), ("b", 0, 0)], r"slices\[1\]"),
    ],
)
def test_other_slices_without_layers_are_refused_as_the_end_is_not_included(
    pair: Path, pieces: list[tuple[str, int, int]], place: str
) -> None:
    text = stacked([(pair / name, start, end) for name, start, end in pieces])
    with pytest.raises(RecipeError, match=r"end is not included.*is layer \d alone.*" + place):
        parse(text, name="t", where="t")


def test_a_stack_loads_in_transformers_with_its_new_depth(home: Warehouse, pair: Path) -> None:
    outcome = run(home, stacked([(pair / "a", 0, 3), (pair / "b", 1, 4)]))
    from transformers import AutoConfig

    assert AutoConfig.from_pretrained(outcome.snapshot.path).num_hidden_layers == 6
    assert logits(outcome.snapshot.path).isfinite().all()


def test_all_layers_in_order_are_the_model_itself(home: Warehouse, pair: Path) -> None:
    outcome = run(home, stacked([(pair / "a", 0, 2), (pair / "a", 2, 4)]))
    assert_equal(tensors(outcome.snapshot.path), tensors(pair / "a"))
    assert torch.equal(logits(outcome.snapshot.path), logits(str(pair / "a")))


def test_a_scale_by_filter_and_slice_changes_only_what_it_names(
    home: Warehouse, pair: Path
) -> None:
    text = f"""\
merge_method: passthrough
slices:
- sources: [{{model: {pair / "a"}, layer_range: [0, 2]}}]
- sources:
  - model: {pair / "a"}
    layer_range: [1, 4]
    parameters:
      scale: [{{filter: o_proj, value: 0.0}}, {{filter: down_proj, value: 0.0}}, {{value: 1.0}}]
"""
    merged = tensors(run(home, text).snapshot.path)
    source = tensors(pair / "a")
    expected = layers_of(source, (0, 1), 0) | layers_of(source, (1, 2, 3), 2)
    for name, value in expected.items():
        found = NUMBER.search(name)
        assert found
        silenced = int(found[1]) >= 2 and ("o_proj" in name or "down_proj" in name)
        assert torch.equal(merged[name], torch.zeros_like(value) if silenced else value), name


def test_interleaved_slices_with_gradients_equal_numpy(home: Warehouse, pair: Path) -> None:
    text = f"""\
merge_method: linear
slices:
- sources:
  - {{model: {pair / "a"}, layer_range: [0, 3], parameters: {{weight: [0.1, 0.9]}}}}
  - {{model: {pair / "b"}, layer_range: [1, 4], parameters: {{weight: [1.0, 0.2, 0.4]}}}}
- sources:
  - {{model: {pair / "a"}, layer_range: [2, 4]}}
  - {{model: {pair / "c"}, layer_range: [4, 6]}}
  parameters: {{weight: [0.3, 0.7]}}
parameters: {{normalize: false}}
"""
    outcome = run(home, text)
    a, b, c = (tensors(pair / n) for n in "abc")
    merged = tensors(outcome.snapshot.path)
    assert config_of(outcome.snapshot.path)["num_hidden_layers"] == 5
    first, second = np.linspace(0.1, 0.9, 3), np.array([1.0, 0.2, 0.4])
    parts = [
        (layers_of(a, (k,), k), layers_of(b, (k + 1,), k), first[k], second[k]) for k in range(3)
    ]
    parts += [
        (layers_of(a, (2 + k,), 3 + k), layers_of(c, (4 + k,), 3 + k), w, w)
        for k, w in enumerate((0.3, 0.7))
    ]
    embedding, head = "model.embed_tokens.weight", ("model.norm.weight", "lm_head.weight")
    parts.append(({embedding: a[embedding]}, {embedding: b[embedding]}, 0.1, 1.0))
    parts.append(({n: a[n] for n in head}, {n: c[n] for n in head}, 0.3, 0.3))
    seen = set()
    for left, right, w, v in parts:
        for name, value in left.items():
            expected = w * value.double().numpy() + v * right[name].double().numpy()
            np.testing.assert_allclose(
                merged[name].numpy(), expected, rtol=1e-6, atol=1e-7, err_msg=name
            )
            seen.add(name)
    assert seen == merged.keys()


def test_slerp_of_shifted_layers_starts_at_the_base(home: Warehouse, pair: Path) -> None:
    text = f"""\
merge_method: slerp
base_model: {pair / "a"}
slices:
- sources:
  - {{model: {pair / "a"}, layer_range: [0, 2]}}
  - {{model: {pair / "c"}, layer_range: [3, 5]}}
parameters: {{t: [0.0, 1.0]}}
"""
    merged = tensors(run(home, text).snapshot.path)
    a, c = tensors(pair / "a"), tensors(pair / "c")
    start, end = layers_of(a, (0,), 0), layers_of(c, (4,), 1)
    for name, value in (start | end).items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-7)
    assert "model.layers.2.input_layernorm.weight" not in merged


def test_slices_of_one_layer_twice_read_it_twice_and_count_it_twice(
    home: Warehouse, pair: Path
) -> None:
    once = run(home, stacked([(pair / "a", 0, 1)])).plan.estimates.expert_bytes_total
    twice = run(home, stacked([(pair / "a", 0, 1)] * 2))
    layer = sum(v.numel() * 4 for v in layers_of(tensors(pair / "a"), (0,), 0).values())
    assert twice.plan.estimates.expert_bytes_total == once + layer
    names = [layer.name for layer in twice.plan.layers]
    assert names == ["embed", "layer.00", "layer.01", "head"]


def test_a_partial_budget_over_slices_stays_within_it(home: Warehouse, pair: Path) -> None:
    text = f"""\
merge_method: task_arithmetic
base_model: {pair / "a"}
slices:
- sources:
  - {{model: {pair / "a"}, layer_range: [0, 3]}}
  - {{model: {pair / "b"}, layer_range: [1, 4], parameters: {{weight: 0.5}}}}
"""
    s = run(home, text, budget="40%").summary()
    assert 0 < s["expert_bytes_read"] == s["expert_bytes_planned"] <= s["budget_bytes"]


def test_a_tied_stack_keeps_its_one_matrix_and_loads(home: Warehouse, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        values = tensors_of(seed, None, dtype=torch.float32, **SIZES)
        write_model(tmp_path / name, values, **SIZES)
    outcome = run(home, stacked([(tmp_path / "a", 0, 3), (tmp_path / "a", 2, 4)]))
    assert "lm_head.weight" not in tensors(outcome.snapshot.path)
    assert logits(outcome.snapshot.path).isfinite().all()


def test_lists_with_an_entry_per_layer_follow_the_layers(home: Warehouse, tmp_path: Path) -> None:
    values = tensors_of(0, None, dtype=torch.float32, **SIZES)
    write_model(tmp_path / "a", values, **SIZES)
    kinds = ["full_attention", "sliding_attention", "full_attention", "linear_attention"]
    change_config(tmp_path / "a", layer_types=kinds)
    outcome = run(home, stacked([(tmp_path / "a", 0, 3), (tmp_path / "a", 1, 4)]))
    assert config_of(outcome.snapshot.path)["layer_types"] == kinds[:3] + kinds[1:]


def test_every_wrong_range_is_told_at_once_and_nothing_is_written(
    home: Warehouse, pair: Path
) -> None:
    text = stacked([(pair / "a", 0, 9), (pair / "b", 1, 4), (pair / "c", 5, 7)])
    with pytest.raises(RecipeError, match="cannot be used") as caught:
        resolve(home, parse(text, name="t", where="t"))
    problems = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 2
    assert "has 4 layers, so no layer 8" in problems
    assert "has 6 layers, so no layer 6" in problems
    assert not [p for p in home.root.rglob("*") if p.is_file()]


@pytest.mark.parametrize("wrong", ["[3, 1]", "[-1, 2]", "[0]", "[0, a]", "[2, 2]", "0-4"])
def test_a_range_that_is_none_is_refused(pair: Path, wrong: str) -> None:
    text = stacked([(pair / "a", 0, 2)]).replace("[0, 2]", wrong)
    with pytest.raises(RecipeError, match="layer_range"):
        parse(text, name="t", where="t")


def test_sources_of_unequal_length_are_refused(pair: Path) -> None:
    text = f"""\
merge_method: linear
slices:
- sources:
  - {{model: {pair / "a"}, layer_range: [0, 3], parameters: {{weight: 1}}}}
  - {{model: {pair / "b"}, layer_range: [0, 2], parameters: {{weight: 1}}}}
"""
    with pytest.raises(RecipeError, match="layers"):
        parse(text, name="t", where="t")


def test_models_of_other_depth_without_slices_are_refused(home: Warehouse, pair: Path) -> None:
    text = "merge_method: linear\nmodels:\n"
    text += "".join(f"- {{model: {pair / n}, parameters: {{weight: 1}}}}\n" for n in "ac")
    with pytest.raises(RecipeError, match="use `slices:` to choose layers"):
        resolve(home, parse(text, name="t", where="t"))


def test_tensors_of_a_width_that_does_not_fit_are_refused(
    home: Warehouse, pair: Path, tmp_path: Path
) -> None:
    values = tensors_of(0, None, dtype=torch.float32, **(SIZES | {"hidden": 64}))
    write_model(tmp_path / "wide", values, **(SIZES | {"hidden": 64}))
    save_file(values, tmp_path / "wide" / "model.safetensors")
    text = "merge_method: linear\nmodels:\n"
    text += f"- {{model: {pair / 'a'}, parameters: {{weight: 1}}}}\n"
    text += f"- {{model: {tmp_path / 'wide'}, parameters: {{weight: 1}}}}\n"
    with pytest.raises(RecipeError, match="do not fit"):
        resolve(home, parse(text, name="t", where="t"))


def _with_towers(folder: Path, config: Mapping[str, object], stacks: dict[str, int]) -> Path:
    """A model of two stacks, given with their depths, whose layers hold one vector each."""
    names = [f"{stack}.layers.{k}.norm.weight" for stack, n in stacks.items() for k in range(n)]
    folder.mkdir()
    values = {name: torch.full((4,), float(i)) for i, name in enumerate(names)}
    save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _config_of_slices(home: Warehouse, model: Path, *taken: tuple[str, int, int]) -> dict[str, Any]:
    """The config of a result whose `modules` each take two ranges of layers of a model."""
    lines = ["merge_method: passthrough", "modules:"]
    for module, end, start in taken:
        lines += [f"  {module}:", "    slices:"]
        for layers in ([0, end], [start, 3]):
            lines.append(f"    - sources: [{{model: {model}, layer_range: {layers}}}]")
    folder = run(home, "\n".join(lines)).snapshot.path
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return config


def test_the_layers_of_each_tower_are_counted_where_the_config_states_them(
    home: Warehouse, tmp_path: Path
) -> None:
    kinds = ["full", "sliding", "full"]
    stated = {
        "text_config": {"num_hidden_layers": 3, "layer_types": kinds},
        "vision_config": {"depth": 5},
    }
    stacks = {"vision_tower": 5, "language_model": 3}
    model = _with_towers(tmp_path / "a", stated, stacks)
    seeing = _config_of_slices(home, model, ("vision_tower", 2, 1))
    assert seeing["vision_config"] == {"depth": 4}
    assert seeing["text_config"] == stated["text_config"]
    both = _config_of_slices(home, model, ("vision_tower", 1, 2), ("text_decoder", 2, 1))
    assert both["vision_config"] == {"depth": 2}
    assert both["text_config"] == {
        "num_hidden_layers": 4,
        "layer_types": ["full", "sliding", "sliding", "full"],
    }


def test_the_layers_of_a_tower_are_stated_where_its_config_left_the_default_out(
    home: Warehouse, tmp_path: Path
) -> None:
    stated: dict[str, object] = {"text_config": {"model_type": "llama"}, "vision_config": {}}
    model = _with_towers(tmp_path / "a", stated, {"vision_tower": 4, "language_model": 3})
    config = _config_of_slices(home, model, ("text_decoder", 2, 1), ("vision_tower", 1, 2))
    assert config["text_config"] == {"model_type": "llama", "num_hidden_layers": 4}
    assert config["vision_config"] == {"num_hidden_layers": 2}


def test_layers_are_counted_at_both_places_where_a_config_states_them(
    home: Warehouse, tmp_path: Path
) -> None:
    """Saved by some versions of transformers, a Qwen2-VL says the text's sizes twice."""
    stated = {"num_hidden_layers": 3, "text_config": {"num_hidden_layers": 3}}
    model = _with_towers(tmp_path / "a", stated, {"visual": 2, "model": 3})
    config = _config_of_slices(home, model, ("text_decoder", 1, 2))
    assert config["num_hidden_layers"] == config["text_config"]["num_hidden_layers"] == 2


def test_the_layers_of_encoder_and_decoder_are_counted_apart(
    home: Warehouse, tmp_path: Path
) -> None:
    stated = {"num_hidden_layers": 3, "encoder_layers": 3, "decoder_layers": 4}
    model = _with_towers(tmp_path / "a", stated, {"model.encoder": 3, "model.decoder": 4})
    config = _config_of_slices(home, model, ("decoder", 1, 2))
    assert (config["encoder_layers"], config["num_hidden_layers"]) == (3, 3)
    assert config["decoder_layers"] == 2
    config = _config_of_slices(home, model, ("encoder", 2, 1))
    assert (config["encoder_layers"], config["num_hidden_layers"]) == (4, 4)
    assert config["decoder_layers"] == 4


def test_kinds_of_layers_follow_layers_that_only_change_places(
    home: Warehouse, pair: Path, tmp_path: Path
) -> None:
    shutil.copytree(pair / "a", tmp_path / "a")
    change_config(tmp_path / "a", layer_types=["p", "q", "r", "s"])
    outcome = run(home, stacked([(tmp_path / "a", 2, 4), (tmp_path / "a", 0, 2)]))
    config = json.loads((Path(outcome.snapshot.path) / "config.json").read_text())
    assert config["layer_types"] == ["r", "s", "p", "q"]
