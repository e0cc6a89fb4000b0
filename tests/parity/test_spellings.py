"""What mergekit takes in recipes: other words for yes, empty lists, keys that it ignores.

Each test has mergekit merge here and now, and us the same recipe.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.resolution.recipe_text import load_recipe, parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.replay import replay
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.conftest import FamilyOf
from tests.parity.peer import plan_of_mergekit, read_model, run_mergekit
from tests.parity.recipes import fill
from tests.support.architectures import Tensors

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("mergekit_is_here")]

TWO = (
    "merge_method: {method}\nbase_model: $base\nparameters: {{{parameters}}}\nmodels:\n"
    "- {{model: $e0, parameters: {{weight: {weight}}}}}\n"
    "- {{model: $e1, parameters: {{weight: 0.2}}}}\ndtype: float32\n"
)


def assert_merged_alike(home: Warehouse, text: str) -> Tensors:
    ours, theirs = read_model(Path(run(home, text).snapshot.path)), run_mergekit(text)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6, msg=name)
    return ours


@pytest.mark.parametrize("word", ["true", "False", "yes", "no", "on", "off", "1", "0", "t", "n"])
def test_a_word_for_yes_or_no_means_what_it_means_in_mergekit(
    home: Warehouse, family_of: FamilyOf, word: str
) -> None:
    given = f'normalize: "{word}"'
    text = TWO.format(method="task_arithmetic", parameters=given, weight=0.7)
    assert_merged_alike(home, fill(text, family_of("llama", "float32")))


def test_other_words_are_refused(home: Warehouse, family_of: FamilyOf) -> None:
    text = TWO.format(method="ties", parameters='normalize: "maybe"', weight=0.7)
    with pytest.raises(RecipeError, match="expected true or false, found 'maybe'"):
        run(home, fill(text, family_of("llama", "float32")))


@pytest.mark.parametrize("parameters", ["weight: 0.4", "weight: 0.4, normalize: []"])
def test_an_empty_list_leaves_a_parameter_to_the_next_level(
    home: Warehouse, family_of: FamilyOf, parameters: str
) -> None:
    text = TWO.format(method="ties", parameters=parameters, weight="[]")
    text = fill(text, family_of("llama", "float32"))
    assert_merged_alike(home, text)
    assert any("an empty list" in w for w in parse(text, name="r", where="r").warnings)


@pytest.mark.parametrize(
    "method", ["ties", "task_arithmetic", "dare_ties", "della", "breadcrumbs", "sce", "ram"]
)
def test_the_base_alone_is_the_result(home: Warehouse, family_of: FamilyOf, method: str) -> None:
    family = family_of("llama", "float32")
    text = f"merge_method: {method}\nbase_model: $base\nmodels: [{{model: $base}}]\n"
    ours = assert_merged_alike(home, fill(text, family))
    assert all(torch.equal(v, ours[n]) for n, v in read_model(family / "base").items())


@pytest.mark.parametrize("method", ["linear", "ties", "task_arithmetic"])
def test_a_model_listed_twice_counts_twice_as_two_folders_do_in_mergekit(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path, method: str
) -> None:
    family = family_of("llama", "float32")
    text = TWO.format(method=method, parameters="", weight=0.7)
    if method == "linear":
        text = text.replace("base_model: $base\n", "")
    twice = fill(text.replace("$e1", "$e0"), family)
    with pytest.raises(ValueError, match="Duplicate merge inputs"):
        run_mergekit(twice)
    again = shutil.copytree(family / "expert_00", tmp_path / "again")
    theirs = run_mergekit(fill(text.replace("$e1", str(again)), family))
    outcome = run(home, twice)
    assert any("listed twice: both count" in w for w in outcome.plan.warnings)
    for name, value in read_model(Path(outcome.snapshot.path)).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_model_may_be_merged_with_other_layers_of_its_own(
    home: Warehouse, family_of: FamilyOf
) -> None:
    family = family_of("llama", "float32")
    text = "merge_method: linear\nslices:\n- sources:\n"
    for layers in ("[0, 2]", "[2, 4]"):
        text += f"  - {{model: $e0, layer_range: {layers}, parameters: {{weight: 0.5}}}}\n"
    merged = read_model(Path(run(home, fill(f"{text}dtype: float32\n", family)).snapshot.path))
    own = read_model(family / "expert_00")
    name = "model.layers.{}.mlp.up_proj.weight"
    mean = (own[name.format(1)] + own[name.format(3)]) / 2
    torch.testing.assert_close(merged[name.format(1)], mean)


#: What mergekit ignores, and what is said of it.
IGNORED = {
    "a key at the top": ("colour: red\n", "unknown key `colour`"),
    "a parameter at the top": ("weight: 0.5\n", "`weight` is a parameter of the method"),
    "an unknown parameter": ("parameters: {wieght: 1}\n", "no parameter `wieght`"),
}


@pytest.mark.parametrize("case", IGNORED)
def test_what_mergekit_ignores_is_refused_and_leniently_warned_about(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path, case: str
) -> None:
    line, said = IGNORED[case]
    text = TWO.format(method="ties", parameters="", weight=0.7).replace("parameters: {}\n", "")
    text = fill(text + line, family_of("llama", "float32"))
    (tmp_path / "r.yml").write_text(text)
    with pytest.raises(RecipeError, match=said):
        load_recipe(tmp_path / "r.yml", home)
    merged = merge(home, load_recipe(tmp_path / "r.yml", home, lenient=True))
    assert any(said in w for w in merged.outcome.plan.warnings)
    theirs = run_mergekit(text)
    for name, value in read_model(Path(merged.outcome.snapshot.path)).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6, msg=name)
    assert replay(home, merged.outcome.snapshot.snapshot_id).layers > 0


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{model: $e0, layer_range: [0, 4]}", "use `slices:` to choose layers"),
        ("{model: $e0, parameters: {normalize: false}}", "`normalize` is set once for all models"),
        ("{model: $e0, parameters: {weight: true}}", "write 1 or 0 if you mean it"),
        ("{model: $e0, parameters: {weight: [{value: 1, filtre: mlp}]}}", "unknown key `filtre`"),
    ],
)
def test_what_mergekit_ignores_of_an_entry_is_ignored_leniently(
    home: Warehouse, family_of: FamilyOf, entry: str, said: str
) -> None:
    text = "merge_method: ties\nbase_model: $base\nparameters: {weight: 1, normalize: true}\n"
    text = fill(f"{text}models: [{entry}, {{model: $e1}}]\ndtype: float32\n", family_of("llama"))
    with pytest.raises(RecipeError, match=said):
        parse(text, name="r", where="r")
    parsed = parse(text, name="r", where="r", lenient=True)
    assert any(said in w for w in parsed.warnings)
    theirs = plan_of_mergekit(text)
    for t in resolve(home, parsed).recipe.tensors:
        if t.inputs:
            planned = theirs[t.name]
            assert [dict(i.params)["weight"] for i in t.inputs] == [
                p["weight"] for p in planned.model_params
            ]
            assert dict(t.params)["normalize"] is planned.params["normalize"] is True


def test_models_of_two_architectures_with_equal_names_are_warned_about(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path
) -> None:
    family = family_of("llama", "float32")
    other = shutil.copytree(family / "expert_00", tmp_path / "mistral")
    config = json.loads((other / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (other / "config.json").write_text(json.dumps(config))
    text = fill(TWO.format(method="ties", parameters="", weight=0.7), family)
    assert not any("architectures" in w for w in run(home, text).plan.warnings)
    mixed = text.replace(str(family / "expert_00"), str(other))
    with pytest.raises(RuntimeError, match="allow-crimes"):
        run_mergekit(mixed)
    told = [w for w in run(home, mixed).plan.warnings if "different architectures" in w]
    assert len(told) == 1
    assert "LlamaForCausalLM" in told[0]
    assert "MistralForCausalLM" in told[0]


def test_gradients_follow_mergekits_layers_in_towers_and_between_them(
    home: Warehouse, tmp_path: Path
) -> None:
    for model in ("base", "e0"):
        tiny_vision(tmp_path / model)
    text = (
        f"merge_method: task_arithmetic\nbase_model: {tmp_path}/base\nmodels:\n"
        f"- {{model: {tmp_path}/e0, parameters: {{weight: [0.1, 0.5, 0.9]}}}}\n"
    )
    theirs = {n: p.model_params[0]["weight"] for n, p in plan_of_mergekit(text).items()}
    resolved = resolve(home, parse(text, name="r", where="r"))
    found = {t.name: dict(t.inputs[0].params)["weight"] for t in resolved.recipe.tensors}
    compared = {n: v for n, v in found.items() if n in theirs}
    assert compared == pytest.approx({n: theirs[n] for n in compared})
    assert {n.split(".")[2] for n in compared if "merger" in n} == {"ln_q", "mlp"}
    assert len([n for n in compared if ".blocks." in n]) > 10


def tiny_vision(folder: Path) -> None:
    """A Qwen2.5-VL with towers of three and two layers, as the hub's files name its tensors."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config: Any = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=sizes | heads,
        vision_config=vision | {"intermediate_size": 48},
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = Qwen2_5_VLForConditionalGeneration(config)
    folder.mkdir()
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(folder)
    names = {"model.language_model.": "model.", "model.visual.": "visual."}
    tensors = {}
    for name, value in model.state_dict().items():
        for new, old in names.items():
            name = old + name.removeprefix(new) if name.startswith(new) else name
        tensors[name] = value.clone().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
