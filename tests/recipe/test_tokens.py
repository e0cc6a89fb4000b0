"""What a recipe may wish of the tokenizer and the chat template."""

from __future__ import annotations

from mergepipe_pipeline.domain.recipe import TokenizerRecipe, TokenRule
from tests.recipe.schemas import number, parse, resolve

RECIPE = """\
merge_method: linear
base_model: base
models: [{model: a}, {model: base}]
parameters: {weight: 1}
"""


def test_without_a_wish_there_is_no_tokenizer_recipe() -> None:
    assert parse(RECIPE).tokenizer is None
    assert parse(RECIPE).chat_template is None


def test_a_source_is_the_union_the_base_or_a_model() -> None:
    assert parse(RECIPE + "tokenizer_source: union\n").tokenizer == TokenizerRecipe("union")
    assert parse(RECIPE + "tokenizer_source: base\n").tokenizer == TokenizerRecipe(1)
    assert parse(RECIPE + "tokenizer_source: a\n").tokenizer == TokenizerRecipe(0)
    assert parse(RECIPE + "tokenizer: {}\n").tokenizer == TokenizerRecipe("union")


def test_a_model_named_for_its_tokenizer_alone_is_one_of_the_models() -> None:
    recipe = resolve(RECIPE + "tokenizer_source: org/other@v1\n")
    assert recipe.tokenizer == TokenizerRecipe(number(recipe, "org/other@v1"))
    assert all(i.model != 2 for t in recipe.tensors for i in t.inputs)


def test_every_rule_for_a_token_is_read() -> None:
    raw = parse(
        RECIPE
        + """\
tokenizer:
  source: union
  pad_to_multiple_of: 8
  tokens:
    a1: {source: a}
    a2: {source: {model: {path: a}}, force: true}
    z: {source: {kind: zero}}
    m: {source: {kind: model_token, model: base, token: x}}
    n: {source: {kind: model_token, model: base, token_id: 7}, force: true}
    d: {}
    e:
chat_template: auto
"""
    )
    assert raw.tokenizer == TokenizerRecipe(
        "union",
        (
            TokenRule("a1", "model", 0),
            TokenRule("a2", "model", 0, force=True),
            TokenRule("z", "zero"),
            TokenRule("m", "model_token", 1, of_token="x"),
            TokenRule("n", "model_token", 1, of_id=7, force=True),
            TokenRule("d", "default"),
            TokenRule("e", "default"),
        ),
        8,
    )
    assert raw.chat_template == "auto"
