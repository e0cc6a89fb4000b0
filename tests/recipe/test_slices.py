"""Slices and modules: layers taken, numbered anew, and with parameters of their own level."""

from __future__ import annotations

import pytest

from mergepipe_pipeline.domain.recipe import BaseTensor
from mergepipe_pipeline.errors import RecipeError
from tests.recipe.schemas import inputs, names_of, resolve, table, values

EIGHT = table(names_of(8))
UP = "model.layers.{}.mlp.up.weight"
STACKED = """\
merge_method: passthrough
slices:
- sources: [{model: a, layer_range: [0, 2]}]
- sources: [{model: b, layer_range: [1, 3]}]
"""
PAIRS = """\
merge_method: slerp
base_model: a
slices:
- sources:
  - {model: a, layer_range: [0, 3]}
  - {model: b, layer_range: [4, 7]}
- sources:
  - {model: a, layer_range: [7, 8]}
  - {model: b, layer_range: [0, 1]}
  parameters: {t: [0.2, 0.4]}
parameters: {t: [0, 1]}
"""
VISION = (
    *(f"model.visual.blocks.{k}.qkv.weight" for k in range(2)),
    "model.visual.merger.mlp.weight",
    *(f"model.language_model.layers.{k}.up.weight" for k in range(3)),
    "lm_head.weight",
)


def _problems(text: str, **known: object) -> tuple[str, ...]:
    with pytest.raises(RecipeError, match="nothing was read or written") as caught:
        resolve(text, **known)  # type: ignore[arg-type]
    return caught.value.problems


def test_layers_are_numbered_anew_in_the_order_of_the_slices() -> None:
    recipe = resolve(STACKED)
    made = inputs(recipe)
    assert [made[UP.format(k)] for k in range(4)] == [
        [("a", UP.format(0))],
        [("a", UP.format(1))],
        [("b", UP.format(1))],
        [("b", UP.format(2))],
    ]
    assert tuple(made) == names_of(4)
    assert dict(recipe.sliced) == {"model.layers.": 4}


def test_embeddings_come_from_the_first_slice_and_the_head_from_the_last() -> None:
    made = inputs(resolve(STACKED))
    assert made["model.embed_tokens.weight"] == [("a", "model.embed_tokens.weight")]
    assert made["model.norm.weight"] == [("b", "model.norm.weight")]
    assert made["lm_head.weight"] == [("b", "lm_head.weight")]


def test_the_number_of_layers_is_told_only_where_there_are_slices() -> None:
    assert dict(resolve(STACKED.replace("[1, 3]", "[2, 3]")).sliced) == {"model.layers.": 3}
    assert resolve("merge_method: passthrough\nmodels: [{model: a}]\n").sliced == ()


def test_base_and_expert_give_different_layers_to_one_output_layer() -> None:
    recipe = resolve(PAIRS, every=EIGHT)
    tensors = {t.name: t for t in recipe.tensors}
    assert inputs(recipe)[UP.format(1)] == [("b", UP.format(5))]
    assert tensors[UP.format(1)].base == BaseTensor(0, UP.format(1))
    assert tensors[UP.format(3)].base == BaseTensor(0, UP.format(7))
    assert inputs(recipe)[UP.format(3)] == [("b", UP.format(0))]


def test_a_gradient_starts_anew_in_each_slice_and_a_slices_own_goes_first() -> None:
    t = values(resolve(PAIRS, every=EIGHT), "t")
    assert [t[UP.format(k)] for k in range(4)] == [0.0, 0.5, 1.0, 0.4]
    assert t["model.embed_tokens.weight"] == 0.0
    assert t["lm_head.weight"] == t["model.norm.weight"] == 0.2


def test_a_source_goes_before_its_slice_the_slice_before_the_recipe() -> None:
    text = """\
merge_method: linear
slices:
- sources:
  - {model: a, layer_range: [0, 3], parameters: {weight: 1}}
  - {model: b, layer_range: [0, 3]}
  parameters: {weight: [{filter: mlp, value: 2}]}
parameters: {weight: 3}
"""
    recipe = resolve(text)
    assert set(values(recipe, "weight", "a").values()) == {1.0}
    weight = values(recipe, "weight", "b")
    assert weight[UP.format(1)] == 2.0
    assert weight["model.norm.weight"] == 3.0


def test_a_models_filter_sees_its_own_name_and_a_methods_the_outputs() -> None:
    text = STACKED.replace(
        "{model: b,", "{model: b, parameters: {scale: [{filter: '.2.', value: 5}]},"
    )
    scale = values(resolve(text), "scale", "b")
    assert scale[UP.format(3)] == 5.0
    assert scale[UP.format(2)] == 1.0
    text = PAIRS.replace("{t: [0, 1]}", "{t: [{filter: '.2.', value: 9}, {value: 1}]}")
    t = values(resolve(text, every=EIGHT), "t")
    assert (t[UP.format(2)], t[UP.format(1)]) == (9.0, 1.0)


def test_each_slice_may_have_a_base_of_its_own() -> None:
    text = """\
merge_method: slerp
slices:
- base_model: a
  sources: [{model: a, layer_range: [0, 1]}, {model: b, layer_range: [0, 1]}]
- base_model: b
  sources: [{model: a, layer_range: [1, 3]}, {model: b, layer_range: [1, 3]}]
parameters: {t: 0.5}
"""
    recipe = resolve(text)
    assert recipe.base is None
    bases = {t.name: t.base.model for t in recipe.tensors if t.base}
    assert (bases[UP.format(0)], bases[UP.format(1)]) == (0, 1)
    assert resolve(text.replace("base_model: b", "base_model: a")).base == 0


def test_slices_of_a_model_with_two_stacks_ask_for_modules() -> None:
    text = "merge_method: passthrough\nslices:\n- sources: [{model: a, layer_range: [0, 2]}]\n"
    (problem,) = _problems(text, every=table(VISION))
    assert "one stack of layers" in problem
    assert problem.endswith("choose a part with `modules:`")


def test_slices_within_a_module_number_its_layers_alone() -> None:
    text = """\
merge_method: passthrough
modules:
  text_decoder:
    slices:
    - sources: [{model: a, layer_range: [0, 2]}]
    - sources: [{model: a, layer_range: [0, 3]}]
"""
    recipe = resolve(text, every=table(VISION))
    assert dict(recipe.sliced) == {"model.language_model.layers.": 5}
    assert sum("language_model.layers" in t.name for t in recipe.tensors) == 5
    copies = [t.name for t in recipe.tensors if not t.inputs]
    assert copies == list(VISION[:3])
    assert "modules: 3 tensors are in none of them" in recipe.warnings[-1]


def test_layers_that_slices_of_a_module_leave_out_are_not_copied() -> None:
    text = """\
merge_method: passthrough
modules:
  text_decoder:
    slices:
    - sources: [{model: a, layer_range: [2, 3]}]
"""
    recipe = resolve(text, every=table(VISION))
    layers = [t.name for t in recipe.tensors if "language_model.layers" in t.name]
    assert layers == ["model.language_model.layers.0.up.weight"]
    assert "modules: 3 tensors are in none of them" in recipe.warnings[-1]


def test_modules_take_different_models_and_their_own_parameters() -> None:
    text = """\
merge_method: task_arithmetic
base_model: base
modules:
  text_decoder: {models: [{model: a}], parameters: {weight: 2}}
  vision_tower: {models: [{model: b}]}
  multi_modal_projector: {models: [{model: a}, {model: b}]}
parameters: {weight: 1}
"""
    recipe = resolve(text, every=table(VISION))
    made = inputs(recipe)
    assert [m for m, _ in made["model.language_model.layers.0.up.weight"]] == ["a"]
    assert [m for m, _ in made["model.visual.blocks.0.qkv.weight"]] == ["b"]
    assert [m for m, _ in made["model.visual.merger.mlp.weight"]] == ["a", "b"]
    assert values(recipe, "weight", "a")["lm_head.weight"] == 2.0
    assert values(recipe, "weight", "a")["model.visual.merger.mlp.weight"] == 1.0
    assert sorted(made) == sorted(VISION)


def test_a_dotted_prefix_is_a_module() -> None:
    text = """\
merge_method: passthrough
modules: {model.visual: {models: [{model: a}]}}
"""
    made = inputs(resolve(text, every=table(VISION)))
    assert [name for name, parts in made.items() if parts] == list(VISION[:3])


@pytest.mark.parametrize("rest", ["default", "text_decoder"])
@pytest.mark.parametrize("is_last", [True, False])
def test_the_rest_of_a_model_is_what_no_other_module_has(rest: str, is_last: bool) -> None:
    parts = [
        "  model.language_model.layers: {models: [{model: b}]}\n",
        f"  {rest}: {{models: [{{model: a}}]}}\n",
    ]
    text = "merge_method: passthrough\nmodules:\n" + "".join(parts if is_last else parts[::-1])
    made = inputs(resolve(text, every=table(VISION)))
    by_model = {name: taken[0][0] for name, taken in made.items() if taken}
    layers = {name for name in VISION if "layers" in name}
    assert {name for name, model in by_model.items() if model == "b"} == layers
    assert by_model["lm_head.weight"] == "a"
    assert ("model.visual.merger.mlp.weight" in by_model) is (rest == "default")


def test_a_tensor_of_two_modules_is_refused() -> None:
    text = """\
merge_method: passthrough
modules:
  model.visual: {models: [{model: a}]}
  multi_modal_projector: {models: [{model: b}]}
"""
    (problem,) = _problems(text, every=table(VISION))
    assert "1 of its tensors belong to the module model.visual, too" in problem


def test_vision_and_text_have_gradients_of_their_own_length() -> None:
    text = "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]\nparameters: {t: [0, 1]}\n"
    t = values(resolve(text, every=table(VISION)), "t")
    assert t["model.visual.blocks.1.qkv.weight"] == 1.0
    assert t["model.language_model.layers.1.up.weight"] == 0.5
