"""Whatever the text, it parses or it is refused by name: no other exception comes out."""

from __future__ import annotations

import contextlib

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.errors import BudgetError, RecipeError
from tests.recipe.schemas import METHODS, resolve, table
from tests.recipe.synthetic import parse_all
from tests.support.laws import examples

# fmt: off
KEYS = st.sampled_from([
    "merge_method", "models", "base_model", "model", "parameters", "weight", "density",
    "budget", "filter", "value", "dtype", "seed", "ref", "schedule", "block_size", "slices",
    "strategy", "tokenizer_source", "normalize", "out_dtype", "x", "sources", "modules", "name",
    "layer_range", "lora", "path", "revision", "tokenizer", "tokens", "source", "kind", "variant",
])
# fmt: on
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.dates(),
    st.binary(max_size=3),
    st.sampled_from(["ties", "linear", "base", "a", "25%", "bfloat16", "mlp", "0 3 * * *", "a+b"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
SLICES = st.lists(
    st.fixed_dictionaries(
        {
            "sources": st.lists(
                st.fixed_dictionaries(
                    {
                        "model": st.sampled_from(["a", "b", "base", {"model": {"path": "a"}}]),
                        "layer_range": st.lists(st.integers(-1, 4), min_size=2, max_size=2),
                    },
                    optional={"parameters": st.dictionaries(KEYS, VALUES, max_size=2)},
                ),
                max_size=3,
            )
        },
        optional={"base_model": st.sampled_from(["a", "base"]), "residual_weight": SCALARS},
    ),
    max_size=3,
)
SLICED = st.fixed_dictionaries(
    {"merge_method": st.sampled_from(sorted(METHODS)), "slices": SLICES},
    optional={
        "base_model": st.sampled_from(["a", "base"]),
        "parameters": st.fixed_dictionaries({}, optional={"weight": SCALARS, "t": SCALARS}),
        "tokenizer": st.dictionaries(KEYS, VALUES, max_size=3),
        "chat_template": SCALARS,
        "name": SCALARS,
    },
)
RECIPES = st.fixed_dictionaries(
    {
        "merge_method": st.sampled_from(["ties", "linear", "task_arithmetic", "tis"]),
        "models": st.lists(
            st.fixed_dictionaries(
                {"model": st.sampled_from(["a", "b", "base"])},
                optional={"parameters": st.dictionaries(KEYS, VALUES, max_size=3)},
            ),
            max_size=3,
        ),
    },
    optional={
        "base_model": st.just("base"),
        "parameters": st.dictionaries(KEYS, VALUES),
        "x": VALUES,
    }
    | dict.fromkeys(("budget", "seed", "ref", "dtype", "schedule", "block_size"), VALUES),
)
# fmt: off
FRAGMENTS = st.lists(st.sampled_from([
    "merge_method: ties\n", "models:\n", "- model: a\n", "  parameters: ", "{", "}", "[", "]",
    "&a ", "*a ", "<<: ", "!!python/object:os.system ", "!!int ", "!x ", "---\n", "...\n",
    "? ", "|\n ", ">\n ", "'", '"', "\\uD800", "\\U00110000", "\t", "%YAML 9.9\n", "0b_",
    "0x_", "=", ": ", "- ", "# ", "\n", ", ", "2020-01-01", "1:99:99", ".inf", "~", "on",
    "\x07", "\ud800", "9" * 5000, "0x" + "f" * 5000, "!!float ", "!!bool ", "!!timestamp ",
    "!<", "weight: 1",
]), max_size=14).map("".join)
TRAPS = [
    "\"\\U00110000\"", "\"\\uD800\": 1", "a: 0b_", "a: 0x_", "!!int x", "!!bool x: 1",
    "a: !!float x", "%YAML 9999999999999.1\n---\na", "a: =", "a: 0x" + "f" * 5000,
    "? [a]\n: 1", "&a [*a]", "\ud800", "models: [~]", "models: [a]", "models: {a: 1}",
    "a: !!set {b}", "!!python/name:os.system x", "? {a: 1}\n: 2", "<<: {a: 1}", "~: 1", "1: 1",
    "a: &b\n  c: *b", "a: *nowhere", "\x00",
]
# fmt: on


def _is_read_or_refused(text: str) -> None:
    try:
        resolve(text)
    except (RecipeError, BudgetError) as error:
        message = str(error)
    else:
        return
    # A message must be printable on any terminal that speaks UTF-8.
    assert message.encode()


@settings(max_examples=examples(50), deadline=None)
@given(st.text(st.characters(), max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    _is_read_or_refused(text)


@settings(max_examples=examples(50), deadline=None)
@given(FRAGMENTS)
def test_any_heap_of_yaml_is_read_or_refused(text: str) -> None:
    _is_read_or_refused(text)


@settings(max_examples=examples(50), deadline=None)
@given(VALUES | RECIPES | SLICED)
def test_any_value_written_as_yaml_is_read_or_refused(value: object) -> None:
    _is_read_or_refused(yaml.safe_dump(value))


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(RECIPES | SLICED | VALUES, max_size=3))
def test_any_documents_are_stages_or_refused(values: list[object]) -> None:
    with contextlib.suppress(RecipeError, BudgetError):
        assert len(parse_all(yaml.safe_dump_all(values))) == len(values)


@settings(max_examples=examples(50), deadline=None)
@given(SLICED, st.sets(st.sampled_from(["a", "b"])))
def test_slices_of_partial_models_are_resolved_or_refused(value: object, partial: set[str]) -> None:
    some = dict.fromkeys(partial, table(["model.layers.1.mlp.up.weight"]))
    with contextlib.suppress(RecipeError, BudgetError):
        recipe = resolve(yaml.safe_dump(value), some, partial=list(partial))
        assert all(t.inputs or t.base for t in recipe.tensors)


@pytest.mark.parametrize("text", TRAPS, ids=range(len(TRAPS)))
def test_known_traps_of_the_yaml_reader_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="nothing was read or written") as caught:
        resolve(text)
    assert caught.value.problems
