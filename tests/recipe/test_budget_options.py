"""Pins, exclusions, keeps and shares: how they are written, and what their patterns mean."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.recipe import Budget, ModelRef, Selection, Share
from mergepipe_pipeline.errors import BudgetError, RecipeError
from mergepipe_pipeline.recipe.budget import fits, read_budget, selects
from mergepipe_pipeline.recipe.problems import Problems
from mergepipe_pipeline.recipe.references import parse_reference
from tests.recipe.synthetic import parse_all, resolve_all
from tests.support.laws import examples

RECIPE = """\
merge_method: ties
base_model: base
models: [{model: math}, {model: ./experts/code}]
parameters: {weight: 1}
"""


def budget_of(text: str) -> Budget:
    """The budget of a recipe whose `budget:` is `text`."""
    return parse_all(RECIPE + f"budget: {text}\n")[0].budget


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("{limit: 10%}", Budget(fraction=0.1)),
        ("{limit: 8GiB}", Budget(nbytes=8 << 30)),
        ("{limit: none}", Budget()),
        ("{error: 0.02}", Budget(error=0.02)),
        ("{error: 2%}", Budget(error=0.02)),
        ("{error: 1e-3}", Budget(error=0.001)),
        ("{error: 0}", Budget(error=0.0)),
        ("error=2%", Budget(error=0.02)),
        ("{pin: [math]}", Budget(pin=(Selection(("math",)),))),
        (
            "{exclude: [{experts: [math, code], tensors: ['*norm*']}]}",
            Budget(exclude=(Selection(("math", "code"), ("*norm*",)),)),
        ),
        ("{pin: [{tensors: ['*']}]}", Budget(pin=(Selection((), ("*",)),))),
        ("{keep: [lm_head.weight]}", Budget(keep=("lm_head.weight",))),
        (
            "{shares: {math: 50%, '*': 2GB}}",
            Budget(shares=(Share("math", fraction=0.5), Share("*", nbytes=2 * 10**9))),
        ),
    ],
)
def test_a_budget_in_a_recipe_means_what_it_says(text: str, meant: Budget) -> None:
    assert budget_of(text) == meant


def test_a_wrong_amount_alone_is_a_budget_error_and_a_wrong_wish_a_recipe_error() -> None:
    with pytest.raises(BudgetError, match="from 0 to below 1"):
        budget_of("error=2")
    with pytest.raises(RecipeError, match=r"expected a share .*; write 2% for.*budget\.error"):
        budget_of("{error: 2}")
    with pytest.raises(RecipeError, match=r"expected a name .*, found 7.*budget\.keep\[0\]"):
        budget_of("{keep: [7]}")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["1%", "a", "", "*"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["experts", "tensors", "a*", ""]), inner, max_size=2)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["limit", "error", "pin", "exclude", "keep", "shares", "x"])


@settings(max_examples=examples(50), deadline=None)
@given(st.dictionaries(KEYS, VALUES, min_size=1))
def test_any_mapping_is_a_budget_without_problems_or_has_problems_under_its_key(
    value: dict[str, object],
) -> None:
    problems = Problems({})
    budget = read_budget(value, problems)
    assert sum(a is not None for a in (budget.nbytes, budget.fraction, budget.error)) <= 1
    assert all(s.startswith("budget") for s in problems.sentences())
    assert bool(problems) or "x" not in value
    patterns = [p for s in (*budget.pin, *budget.exclude) for p in (*s.experts, *s.tensors)]
    patterns += [*budget.keep, *(s.experts for s in budget.shares)]
    assert all(p.strip() for p in patterns)


@pytest.mark.parametrize("pattern", ["./experts/code", "code", "c*", "./experts/*", "*"])
def test_an_expert_is_called_as_written_or_by_its_folder(pattern: str) -> None:
    assert fits(pattern, ModelRef("./experts/code", "./experts/code"))


@pytest.mark.parametrize(
    ("text", "fitting", "other"),
    [
        ("org/math-7b@main", "math-7b", "org"),
        ("org/base@v1+./loras/math", "base+math", "base"),
        ("Math", "M*", "math"),
    ],
)
def test_a_name_is_without_path_and_revision_and_with_its_adapter(
    text: str, fitting: str, other: str
) -> None:
    ref = parse_reference(text)
    assert fits(text, ref)
    assert fits(fitting, ref)
    assert not fits(other, ref)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "*"]), max_size=2),
    st.lists(st.sampled_from(["x", "y*", "*"]), max_size=2),
    st.sampled_from("abc"),
    st.sampled_from(["x", "yz", "z"]),
)
def test_a_selection_is_the_product_of_its_experts_and_tensors(
    experts: list[str], tensors: list[str], model: str, tensor: str
) -> None:
    by_expert = any(fnmatchcase(model, e) for e in experts or ["*"])
    by_tensor = any(fnmatchcase(tensor, t) for t in tensors or ["*"])
    selection = Selection(tuple(experts), tuple(tensors))
    assert selects(selection, ModelRef(model, model), tensor) == (by_expert and by_tensor)


def test_patterns_are_held_against_the_names_of_their_own_stage() -> None:
    stage = (
        RECIPE.replace("model: base", "model: origin")
        + "name: base\nbudget: {limit: 1KiB, pin: [math]}\n"
    )
    last = "merge_method: ties\nbase_model: base\nmodels: [{model: law}]\n"
    last += "parameters: {weight: 1}\nbudget: {error: 0.1, pin: [law]}\n"
    first, second = resolve_all(stage + "---\n" + last)
    assert first.budget == Budget(error=0.1, pin=(Selection(("math",)),))
    assert second.budget == Budget(error=0.1, pin=(Selection(("law",)),))
    raw, _ = parse_all(stage + "---\n" + last)
    assert raw.warnings == (
        "stage base: budget.limit has no effect; the last recipe of the file gives it",
    )
    with pytest.raises(RecipeError, match=r"no expert fits 'law'; experts are math, \./exp"):
        resolve_all(stage.replace("pin: [math]", "pin: [law]") + "---\n" + last)
