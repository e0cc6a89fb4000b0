"""Which model takes part in which tensor: ties, gaps, adapters alone, models that do not fit."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.layers import stack_counts
from mergepipe_pipeline.domain.recipe import BaseTensor
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.recipe import model_tensors
from mergepipe_pipeline.recipe.model_tensors import ModelTable
from mergepipe_pipeline.recipe.parse import resolve_recipe
from tests.recipe.schemas import NAMES, inputs, names_of, parse, resolve, table, without

TWO = "merge_method: {}\nbase_model: base\nmodels: [{{model: a}}, {{model: b}}]\nparameters: {}\n"
TIES = TWO.format("ties", "{weight: 1}")
LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q0, UP0 = "model.layers.0.self_attn.q.weight", "model.layers.0.mlp.up.weight"


def _problems(text: str, **known: object) -> tuple[str, ...]:
    with pytest.raises(RecipeError, match="nothing was read or written") as caught:
        resolve(text, **known)  # type: ignore[arg-type]
    return caught.value.problems


def test_a_tied_model_gives_its_embedding_for_the_head_another_has() -> None:
    recipe = resolve(TIES, {"a": without({HEAD}), "base": without({HEAD})})
    assert inputs(recipe)[HEAD] == [("a", EMBED), ("b", HEAD)]
    (head,) = (t for t in recipe.tensors if t.name == HEAD)
    assert head.base == BaseTensor(2, EMBED)
    assert any(w.startswith("lm_head.weight is written because") for w in recipe.warnings)


def test_no_head_is_written_where_every_model_ties_it() -> None:
    recipe = resolve(TIES, every=without({HEAD}))
    assert HEAD not in inputs(recipe)


def test_a_required_tensor_that_is_missing_is_one_problem_per_model() -> None:
    assert _problems(TIES, tables={"a": without({Q0, UP0})}) == (
        f"line 3, models[0].model: 'a' lacks 2 of the tensors to merge, first {Q0}",
    )


def test_models_of_other_depth_or_shape_are_told_together() -> None:
    wide = table() | {Q0: TensorEntry(Q0, "F32", (2, 3), "x", 0)}
    assert _problems(TIES, tables={"a": table(names_of(4)), "b": wide}) == (
        "line 3, models[0].model: 'a' has 4 layers at model.layers., 'base' has 3; "
        "use `slices:` to choose layers",
        f"line 3, models[1].model: 'b' has 1 tensors that do not fit, first {Q0} with [2, 3] "
        "where 'base' has [2, 2]",
    )


def test_a_vocabulary_may_be_longer_but_no_wider() -> None:
    longer = table() | {n: TensorEntry(n, "F32", (5, 2), "x", 0) for n in (EMBED, HEAD)}
    assert [m for m, _ in inputs(resolve(TIES, {"a": longer}))[EMBED]] == ["a", "b"]
    wider = table() | {EMBED: TensorEntry(EMBED, "F32", (2, 5), "x", 0)}
    assert "do not fit" in _problems(TIES, tables={"a": wider})[0]


def test_integers_cannot_be_merged_with_weights() -> None:
    packed = table() | {Q0: TensorEntry(Q0, "I8", (2, 2), "x", 0)}
    assert f"first {Q0} in I8" in _problems(TIES, tables={"a": packed})[0]


def test_tensors_beyond_the_bases_are_left_out_with_a_warning() -> None:
    recipe = resolve(TIES, {"b": table((*NAMES, "score.weight"))})
    assert "score.weight" not in inputs(recipe)
    assert (
        "'b' has 1 tensors that the result has not, first score.weight: they are left out "
        "(make it the base model to keep them)" in recipe.warnings
    )


@pytest.mark.parametrize("alone", ["mtp.fc.weight", "mtp.norm.weight", "v_head.weight"])
@pytest.mark.parametrize("lead", ["base", "a"])
def test_parts_that_one_model_alone_has_are_copied_from_the_one_the_result_is_like(
    lead: str, alone: str
) -> None:
    text = TIES if lead == "base" else LINEAR
    recipe = resolve(text, {lead: table((*NAMES, alone))})
    (found,) = (t for t in recipe.tensors if t.name == alone)
    assert (found.base and recipe.models[found.base.model].text, found.inputs) == (lead, ())
    assert (
        f"{lead!r} has 1 tensors that no other model has, first {alone}: they are copied"
        in recipe.warnings
    )


def test_a_layer_that_no_config_counts_is_copied_where_experts_lack_it() -> None:
    gradient = TWO.format("ties", "{weight: [0, 1]}")
    recipe = resolve(gradient, {"base": table(names_of(4))}, depth=3)
    beyond = [t for t in recipe.tensors if t.name.startswith("model.layers.3.")]
    assert [t.inputs for t in beyond] == [(), ()]
    weights = {t.name: dict(t.inputs[0].params)["weight"] for t in recipe.tensors if t.inputs}
    layers = [weights[f"model.layers.{n}.mlp.up.weight"] for n in range(3)]
    assert layers == [0.0, 0.5, 1.0]
    told = "'base' has 2 tensors that no other model has, first model.layers.3."
    assert [w for w in recipe.warnings if w.startswith(told)]


def test_a_layer_that_no_config_counts_is_merged_where_all_have_it() -> None:
    gradient = TWO.format("ties", "{weight: [0, 1]}")
    recipe = resolve(gradient, every=table(names_of(4)), depth=3)
    weights = {t.name: dict(t.inputs[0].params)["weight"] for t in recipe.tensors if t.inputs}
    assert [weights[f"model.layers.{n}.mlp.up.weight"] for n in range(4)] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("lacked", ["self_attn.q", "mlp.up"])
def test_an_expert_without_a_kind_of_tensor_in_any_layer_is_another_model(lacked: str) -> None:
    cut = without({f"model.layers.{n}.{lacked}.weight" for n in range(3)})
    (problem,) = _problems(LINEAR, tables={"b": cut})
    assert "'b' lacks 3 of the tensors to merge" in problem


def test_a_kind_of_tensor_that_no_layer_of_the_base_has_is_left_out() -> None:
    more = table((*NAMES, *(f"model.layers.{n}.self_attn.q_norm.weight" for n in range(3))))
    recipe = resolve(TIES, {"a": more, "b": more})
    assert not [t for t in recipe.tensors if "q_norm" in t.name]
    assert [w for w in recipe.warnings if "3 tensors that the result has not" in w]


@pytest.mark.parametrize("without_config", [0, 1, 2])
@pytest.mark.parametrize("extra", [(), ("a",), ("a", "b"), ("a", "b", "base")])
def test_weights_without_a_config_are_counted_like_the_others(
    without_config: int, extra: tuple[str, ...]
) -> None:
    """Some models have a layer for further tokens (3 to 4); one of them has no config."""
    text, names = TIES, ("a", "b", "base")
    raw = parse(text)
    models = [
        ModelTable(
            ref,
            table(names_of(4 if ref.text in extra else 3)),
            depth=None if ref.text == names[without_config] else 3,
        )
        for ref in raw.references
    ]
    recipe = resolve_recipe(raw, models)
    beyond = [t for t in recipe.tensors if t.name.startswith("model.layers.3.")]
    assert len(beyond) == (2 if "base" in extra else 0)


def test_the_layers_of_a_model_are_counted_once_however_many_tensors_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []

    def count(names: Iterable[str]) -> dict[str, int]:
        counted.append(1)
        return stack_counts(names)

    monkeypatch.setattr(model_tensors, "stack_counts", count)
    deep = table(names_of(40))
    cut = {n: t for n, t in deep.items() if ".mlp." not in n}
    assert len(_problems(TIES, every=deep, tables={"a": cut})) == 1
    assert sum(counted) <= 2 * 3  # three models: of a module, and of all


def test_fewer_layers_than_the_config_tells_are_warned_of() -> None:
    recipe = resolve("merge_method: passthrough\nmodels: [{model: a}]\n", depth=4)
    assert "'a' has 3 layers, and its config.json says 4: are files missing?" in recipe.warnings


def test_a_scale_that_no_layer_of_the_experts_has_is_copied_from_the_base() -> None:
    scales = [f"model.layers.{n}.self_attn.k_scale" for n in range(3)]
    made = inputs(resolve(TIES, {"base": table((*NAMES, *scales))}))
    assert [made[scale] for scale in scales] == [[], [], []]


@pytest.mark.parametrize("hole", [UP0, "model.norm.weight", EMBED])
@pytest.mark.parametrize("method", ["ties", "linear"])
def test_a_model_that_the_result_is_like_and_that_is_cut_short_is_refused(
    hole: str, method: str
) -> None:
    text, lead = (TIES, "base") if method == "ties" else (LINEAR, "a")
    more = {HEAD} if hole == EMBED else set()  # a tied head would stand for it
    problems = _problems(text, tables={lead: without({hole, *more})})
    n = 2 if more and method == "linear" else 1  # a base may lack a head
    said = f"{lead!r} lacks {n} of the tensors to merge, first {hole}"
    assert [p for p in problems if p.endswith(said)]


@pytest.mark.parametrize("hole", [UP0, "model.norm.weight"])
def test_what_is_missing_in_every_expert_is_a_problem_and_no_part_of_the_base_alone(
    hole: str,
) -> None:
    cut = without({hole})
    first, second = _problems(TIES, tables={"a": cut, "b": cut})
    assert "'a' lacks 1 of the tensors to merge" in first
    assert "'b' lacks 1 of the tensors to merge" in second


def test_buffers_are_missed_by_nobody() -> None:
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert buffer not in inputs(resolve(TIES, {"a": table((*NAMES, buffer))}))
    made = inputs(resolve(TIES, {"base": table((*NAMES, buffer)), "a": table((*NAMES, buffer))}))
    assert [m for m, _ in made[buffer]] == ["a"]


def test_an_optional_tensor_that_the_base_lacks_is_a_problem_where_deltas_are_merged() -> None:
    bias = "model.layers.0.mlp.up.bias"
    (problem,) = _problems(TIES, tables={"b": table((*NAMES, bias))})
    assert problem.endswith(f"the base lacks an optional tensor that 'b' has, tensor {bias}")


@pytest.mark.parametrize("text", [TIES, LINEAR])
def test_a_part_that_the_lead_has_not_is_left_out_with_its_biases(text: str) -> None:
    tower = [f"visual.blocks.{i}.attn.proj.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    recipe = resolve(text, {"b": table((*NAMES, *tower))})
    assert not [t.name for t in recipe.tensors if t.name in tower]
    (warning,) = (w for w in recipe.warnings if "'b'" in w)
    assert warning.startswith(f"'b' has 4 tensors that the result has not, first {tower[0]}")
    assert warning.endswith("make it the base model to keep them)")


def test_an_optional_tensor_of_too_few_models_is_copied_or_left_out() -> None:
    bias = "model.layers.0.mlp.up.bias"
    more = table((*NAMES, bias))
    stock = TWO.format("model_stock", "{}")
    copied = resolve(stock, {"base": more})
    assert inputs(copied)[bias] == []
    recipe = resolve(stock, {"base": more, "a": more})
    assert bias not in inputs(recipe)
    assert any(w.startswith(f"{bias} is left out: model_stock takes 2") for w in recipe.warnings)


def test_an_adapter_alone_is_no_input_where_it_changes_nothing() -> None:
    known = {"a": table([Q0])}
    made = inputs(resolve(TIES, known, partial=["a"]))
    assert made[Q0] == [("a", Q0), ("b", Q0)]
    assert made[UP0] == [("b", UP0)]


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("task_arithmetic", "{weight: 1, normalize: true}"),
        ("model_stock", "{}"),
        ("multislerp", "{weight: 1}"),
    ],
)
def test_an_adapter_alone_stays_an_input_where_models_are_counted(
    method: str, parameters: str
) -> None:
    text = TWO.format(method, parameters)
    made = inputs(resolve(text, {"a": table([Q0])}, partial=["a"]))
    assert made[UP0] == [("a", UP0), ("b", UP0)]


def test_a_tensor_that_adapters_alone_leave_is_a_copy_of_the_base() -> None:
    known = {"a": table([Q0]), "b": table([Q0])}
    recipe = resolve(TWO.format("model_stock", "{}"), known, partial=["a", "b"])
    copies = {t.name: t.base for t in recipe.tensors if not t.inputs}
    assert set(copies) == set(NAMES) - {Q0}
    assert copies[UP0] == BaseTensor(2, UP0)


def test_an_adapter_alone_in_slices_needs_the_layers_of_the_base() -> None:
    text = """\
merge_method: task_arithmetic
base_model: base
slices:
- sources:
  - {model: base, layer_range: [0, 2]}
  - {model: a, layer_range: [1, 3]}
parameters: {weight: 1, normalize: true}
"""
    (problem,) = _problems(text, tables={"a": table([Q0])}, partial=["a"])
    assert problem.endswith("so its layers must be those of the base")


def test_an_adapter_alone_without_a_base_is_a_problem() -> None:
    text = "merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: 1}\n"
    (problem,) = _problems(text, tables={"a": table([Q0])}, partial=["a"])
    assert "give its base as `base_model:`" in problem


def test_positions_count_the_entries_besides_the_base() -> None:
    text = TIES.replace("[{model: a}, ", "[{model: a}, {model: base}, ")
    assert {(i.model, i.position) for t in resolve(text).tensors for i in t.inputs} == {
        (0, 0),
        (2, 1),
    }
