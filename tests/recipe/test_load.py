"""Recipes as text: what is understood, what is refused and where, what is only warned of."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time

import pytest

from mergepipe_pipeline.domain.recipe import BaseTensor, Budget, ModelRef
from mergepipe_pipeline.errors import BudgetError, RecipeError
from mergepipe_pipeline.recipe.parse import parse_recipes
from mergepipe_pipeline.recipe.problems import Problems
from mergepipe_pipeline.recipe.schema import validate
from mergepipe_pipeline.recipe.yaml_text import MAX_NBYTES
from tests.recipe.schemas import METHODS, NAMES, inputs, parse, resolve, table, values

SMALL = "merge_method: ties\nbase_model: base\nmodels:\n- model: a\nparameters: {weight: 1}\n"


def _problems(text: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError, match="nothing was read or written") as caught:
        resolve(text)
    return caught.value.problems


def test_all_problems_are_told_at_once_in_the_order_of_the_lines() -> None:
    text = """\
merge_method: tias
bas_model: base
models:
- model: a@main@b
  parameters: {weigth: 1}
- model: b
  weight: .5
parameters:
  density: -2
dtype: bfloat17
budget: lots
seed: -1
"""
    problems = _problems(text)
    assert [p.split(": ")[0] for p in problems] == [
        "line 1, merge_method",
        "line 2, bas_model",
        "line 4, models[0].model",
        "line 7, models[1].weight",
        "line 9, parameters.density",
        "line 10, dtype",
        "line 11, budget",
        "line 12, seed",
    ]


def test_an_error_names_the_file_the_count_and_the_next_step() -> None:
    with pytest.raises(RecipeError, match="A recipe cannot be used") as caught:
        parse(SMALL + "sed: 1\nrev: x\n")
    assert str(caught.value) == (
        "A recipe cannot be used. Where: demo.yml. "
        "Expected a recipe without problems, found 2 problems. "
        "Next: correct all of these; nothing was read or written.\n"
        "  1. line 6, sed: unknown key `sed`; did you mean `seed`?\n"
        "  2. line 7, rev: unknown key `rev`; did you mean `ref`?"
    )
    assert caught.value.exit_code == 11


def test_the_only_problem_is_the_cause_itself() -> None:
    with pytest.raises(RecipeError, match="unknown key") as caught:
        parse(SMALL + "sed: 1\n")
    assert caught.value.for_terminal().splitlines() == [
        "unknown key `sed`; did you mean `seed`?",
        "  where     demo.yml, line 6, sed",
        "  next      correct this; nothing was read or written",
    ]
    assert str(caught.value).startswith("unknown key `sed`; did you mean `seed`? Where: demo.yml")


def test_a_wrong_budget_alone_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match=r"Where: demo\.yml, key budget"):
        parse(SMALL + "budget: lots\n")


def test_defaults_are_filled_in() -> None:
    raw = parse(SMALL)
    assert (raw.strategy, raw.seed, raw.ref) == (None, 0, "demo")
    assert (raw.schedule, raw.trigger, raw.timezone) == (None, "change", "UTC")
    assert (raw.dtype, raw.out_dtype, raw.block_elems) == (None, None, None)
    assert raw.budget == Budget()


def test_every_key_of_our_own_is_read() -> None:
    raw = parse(
        SMALL
        + "budget: 25%\nstrategy: full\nseed: 7\nref: prod-7.b_x\nschedule: '*/5 1-3 1,15 * 0'\n"
        "block_size: 65536\ndtype: bfloat16\nout_dtype: float16\ntokenizer_source: base\n"
    )
    assert raw.budget == Budget(fraction=0.25)
    assert (raw.strategy, raw.seed, raw.ref) == ("full", 7, "prod-7.b_x")
    assert (raw.schedule, raw.trigger) == ("*/5 1-3 1,15 * 0", "nightly")
    assert raw.block_elems == 65536
    assert (raw.dtype, raw.out_dtype) == ("BF16", "F16")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trigger: nightli\n", "expected one of change, nightly, manual.*`nightly`"),
        ("trigger: nightly\ntimezone: Mars/Base\n", "expected the name of a time zone.*timezone"),
        ("trigger: nightly\ntimezone: ../passwd\n", "expected the name of a time zone.*timezone"),
        *(
            (f"trigger: nightly\ntimezone: {name}\n", f"name of a time zone.*found {name!r}")
            for name in ("localtime", "posixrules", "Factory", "posix/Europe/Berlin", "right/UTC")
        ),
        ("timezone: Europe/Berlin\n", "there is no `schedule:`.*timezone"),
        ("trigger: manual\nschedule: 0 3 * * *\n", "a recipe with `trigger: manual`.*schedule"),
    ],
)
def test_a_trigger_that_makes_no_sense_is_refused(text: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        parse(SMALL + text)


def test_a_nightly_recipe_has_a_schedule_in_its_time_zone() -> None:
    raw = parse(SMALL + "trigger: nightly\ntimezone: Europe/Berlin\n")
    assert (raw.schedule, raw.timezone) == ("0 3 * * *", "Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "trigger"),
    [
        ("", "change"),
        ("schedule: 0 3 * * *\n", "nightly"),
        ("schedule: 0 3 * * *\ntrigger: change\n", "change"),
        ("schedule: 0 3 * * *\ntrigger: nightly\n", "nightly"),
        ("trigger: manual\n", "manual"),
    ],
)
def test_a_recipe_that_names_a_schedule_alone_is_left_to_it(text: str, trigger: str) -> None:
    assert parse(SMALL + text).trigger == trigger


def test_out_dtype_is_dtype_unless_it_is_given() -> None:
    assert parse(SMALL + "dtype: float16\n").out_dtype == "F16"


def test_a_listed_base_is_no_expert_of_a_delta_method_and_its_parameters_have_no_effect() -> None:
    recipe = resolve(
        "merge_method: ties\nbase_model: base\nparameters: {weight: 1}\n"
        "models:\n- model: base\n  parameters: {weight: 9}\n- model: a\n"
    )
    assert recipe.models == (ModelRef("base", "base"), ModelRef("a", "a"))
    assert recipe.base == 0
    assert {i.position for t in recipe.tensors for i in t.inputs} == {0}
    assert set(values(recipe, "weight", "a").values()) == {1.0}
    assert values(recipe, "weight", "base") == {}
    assert "models[0].parameters: 'base' is the base, so they have no effect" in recipe.warnings


def test_a_listed_base_is_a_model_like_others_for_linear() -> None:
    recipe = resolve(
        "merge_method: linear\nbase_model: base\nparameters: {weight: 1}\n"
        "models:\n- model: base\n- model: a\n"
    )
    assert {len(t.inputs) for t in recipe.tensors} == {2}
    assert recipe.warnings == ()


def test_an_unlisted_base_of_linear_is_merged_if_the_recipe_gives_it_a_weight() -> None:
    recipe = resolve(
        "merge_method: linear\nbase_model: base\nparameters: {weight: 1}\nmodels:\n- model: a\n"
    )
    assert {tuple(i.model for i in t.inputs) for t in recipe.tensors} == {(0, 1)}
    assert "'base' is not listed, and `linear` merges it" in recipe.warnings[0]


def test_an_unlisted_base_of_linear_without_a_weight_is_a_reference_only_with_a_warning() -> None:
    recipe = resolve(
        "merge_method: linear\nbase_model: base\nmodels:\n- {model: a, parameters: {weight: 1}}\n"
    )
    assert recipe.base == 1
    assert {i.model for t in recipe.tensors for i in t.inputs} == {0}
    assert {t.base.model for t in recipe.tensors if t.base} == {1}
    assert "'base' is not listed" in recipe.warnings[0]


def test_gradients_filters_levels_and_defaults_meet_in_one_number_per_tensor() -> None:
    recipe = resolve("""\
merge_method: ties
base_model: base
models:
- model: a
  parameters:
    weight: [{filter: mlp, value: [0, 1]}, {value: 3}]
    density: [0.2, 0.4]
- model: b
parameters: {weight: 0.5, normalize: [{filter: lm_head, value: false}], lambda: "2"}
""")
    weight, density = values(recipe, "weight", "a"), values(recipe, "density", "a")
    assert [weight[f"model.layers.{k}.mlp.up.weight"] for k in range(3)] == [0.0, 0.5, 1.0]
    assert weight["model.layers.1.self_attn.q.weight"] == 3.0
    assert density["model.layers.1.mlp.up.weight"] == pytest.approx(0.3)
    assert density["lm_head.weight"] == density["model.embed_tokens.weight"] == 0.2
    assert set(values(recipe, "weight", "b").values()) == {0.5}
    assert set(values(recipe, "density", "b").values()) == {1.0}
    assert {n for n, v in values(recipe, "normalize").items() if v is False} == {"lm_head.weight"}
    assert set(values(recipe, "lambda").values()) == {2.0}
    assert set(values(recipe, "int8_mask").values()) == {False}


def test_a_model_without_an_optional_tensor_is_left_out_of_it() -> None:
    text = SMALL.replace("- model: a", "- model: a\n- model: b")
    every = table((*NAMES, "model.layers.0.mlp.up.bias"))
    made = inputs(resolve(text, {"a": table()}, every=every))
    assert [m for m, _ in made["model.layers.0.mlp.up.bias"]] == ["b"]
    assert [m for m, _ in made["model.norm.weight"]] == ["a", "b"]


def test_no_model_takes_part_in_a_tensor_of_integers() -> None:
    tensors = table(("w.layers.0.a",)) | table(("position_ids",), "I64")
    recipe = resolve(SMALL, every=tensors)
    assert [len(t.inputs) for t in recipe.tensors] == [1, 0]
    assert recipe.tensors[1].base == BaseTensor(1, "position_ids")


def test_a_missing_required_parameter_names_model_and_tensor_once() -> None:
    text = SMALL.replace("{weight: 1}", "{weight: [{filter: mlp, value: 1}]}")
    assert _problems(text) == (
        "line 4, models[0]: the required parameter `weight` of model 'a' has no value, "
        "tensor model.embed_tokens.weight and 5 more",
    )


def test_a_missing_parameter_is_told_with_those_that_the_method_does_not_have() -> None:
    text = SMALL.replace("ties", "task_arithmetic").replace("weight: 1", "density: 0.6")
    (problem,) = _problems(text)
    assert "`weight` of model 'a' has no value; `task_arithmetic` has no parameter `density`" in (
        problem
    )


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("merge_method", "merge_metod", "line 1, merge_metod: unknown key `merge_metod`"),
        ("models:", "model:", "line 3, model: unknown key `model`"),
        ("- model:", "- modle:", "line 4, models[0].modle: unknown key `modle`"),
    ],
)
def test_a_misspelt_key_is_told_alone_and_not_as_missing(right: str, wrong: str, told: str) -> None:
    meant = right.strip("- :")
    assert _problems(SMALL.replace(right, wrong)) == (f"{told}; did you mean `{meant}`?",)


def test_a_key_that_only_looks_misspelt_leaves_the_required_one_missing() -> None:
    problems = _problems("merge_method: linear\nmodels:\n- models: a\n")
    assert [p.partition(": ")[2][:27] for p in problems] == [
        "this key is required and mi",
        "`models` belongs to the top",
    ]


def test_options_of_the_budget_at_the_top_are_sent_there() -> None:
    told = "is an option of the budget; move it under `budget:`"
    assert _problems(SMALL + "keep: [a]\npin: [a]\nshares: {a: 50%}\n") == tuple(
        f"line {n}, {key}: `{key}` {told}" for n, key in enumerate(("keep", "pin", "shares"), 6)
    )


def test_weights_that_sum_to_zero_are_refused_only_where_they_divide() -> None:
    text = "merge_method: linear\nmodels:\n- model: a\n  parameters: {weight: 1}\n- model: b\n"
    text += "  parameters: {weight: [{filter: norm, value: -1}, {value: 1}]}\n"
    (problem,) = _problems(text)
    assert "the weights sum to zero" in problem
    assert problem.endswith("tensor model.norm.weight")
    assert resolve(text + "parameters: {normalize: false}\n").method == "linear"


def test_differences_to_mergekit_in_dtype_are_warned_of() -> None:
    (warning,) = resolve(SMALL + "dtype: bfloat16\n").warnings
    assert "dtype bfloat16: the float32 inputs are not rounded to it" in warning
    (warning,) = resolve(SMALL, every=table(dtype="BF16")).warnings
    assert "no dtype: arithmetic is in float32" in warning
    assert resolve(SMALL).warnings == resolve(SMALL + "dtype: float32\n").warnings == ()


def test_a_copy_is_no_arithmetic_to_warn_of() -> None:
    text = "merge_method: passthrough\nmodels: [{model: a}]\n"
    short = table(dtype="BF16")
    assert resolve(text, every=short).warnings == ()
    assert resolve(text + "dtype: float16\n", every=table()).warnings == ()
    (warning,) = resolve(text + "parameters: {scale: 0.5}\n", every=short).warnings
    assert "no dtype: arithmetic is in float32" in warning


def test_a_filter_that_matches_nothing_is_warned_of() -> None:
    text = SMALL.replace("{weight: 1}", "{weight: [{filter: mpl, value: 1}, {value: 2}]}")
    assert resolve(text).warnings == ("parameters.weight: the filter 'mpl' matches no tensor",)


def test_a_name_that_is_no_ref_asks_for_one() -> None:
    with pytest.raises(RecipeError, match=r"cannot be its ref.*give it one with `ref:`"):
        parse_recipes(SMALL, name="my recipe", where="x", methods=METHODS)
    named = parse_recipes(SMALL + "ref: r\n", name="my recipe", where="x", methods=METHODS)[-1]
    assert named.ref == "r"


def test_a_file_beyond_the_size_limit_is_not_parsed() -> None:
    (problem,) = _problems("#" * (MAX_NBYTES + 1))
    assert f"may have {MAX_NBYTES} bytes" in problem


def test_aliases_work_and_a_bomb_of_them_is_refused_fast() -> None:
    text = SMALL.replace("{weight: 1}", "{weight: &w 0.5, lambda: *w}")
    assert set(values(resolve(text), "lambda").values()) == {0.5}
    rows = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))
    assert any("simplify it" in p for p in _problems(f"a0: &a0 [x]\n{rows}\n"))
    assert any("simplify it" in p for p in _problems("models: &m [*m]\n"))


def test_deep_nesting_is_a_problem_not_a_crash() -> None:
    assert _problems("models: " + "[" * 5000) == ("the YAML is nested too deeply",)


def test_very_many_wrong_keys_are_told_in_a_time_that_grows_with_their_number() -> None:
    models = [{"model": "a", "layer_range": number} for number in range(16_000)]
    problems, began_s = Problems({}), time.process_time()
    assert validate({"merge_method": "linear", "models": models}, problems) is None
    assert len(problems) == 16_000
    assert time.process_time() - began_s < 3  # each compared with all takes 8


def test_a_raw_recipe_travels_between_processes() -> None:
    raw = parse(SMALL)
    assert pickle.loads(pickle.dumps(raw)) == raw
    assert isinstance(hash(raw), int)


def test_reading_recipes_imports_no_torch() -> None:
    code = "import sys, mergepipe_pipeline.recipe.parse; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
