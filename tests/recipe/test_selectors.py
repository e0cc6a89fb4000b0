"""Selectors in recipe text: a recipe with one is the recipe with the models written out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.selector import Selected, Selector, by_expert
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.recipe.parse import ParsedRecipe, parse_recipes
from mergepipe_pipeline.recipe.selectors import NothingSelectedError, Recorded, fits
from mergepipe_pipeline.storage.forms import record_of
from tests.recipe.schemas import METHODS

NAMES = ("chat-a", "chat-b", "code-a", "code-b", "math")
TAGS = {"chat-b": frozenset({"new"}), "math": frozenset({"new"})}


def choose(place: str, selector: Selector, reserved: Mapping[str, str]) -> Selected:
    """What a selector takes of NAMES."""
    found = [n for n in NAMES if fits(selector, n, lambda n: TAGS.get(n, frozenset()))]
    taken = tuple(n for n in found if n not in reserved)
    if not taken:
        raise NothingSelectedError(f"nobody of {found}")
    return Selected(place, selector, taken, tuple((n, reserved[n]) for n in found if n in reserved))


def parse(models: list[dict[str, Any]], **keys: Any) -> ParsedRecipe:
    text = yaml.safe_dump({"merge_method": "ties", "base_model": "base", "models": models, **keys})
    return parse_recipes(text, name="r", where="r.yml", methods=METHODS, choose=choose)[-1]


def problems_of(text: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        parse_recipes(text, name="r", where="r.yml", methods=METHODS, choose=choose)
    return caught.value.problems


def meaning(parsed: ParsedRecipe) -> list[Any]:
    """All that a recipe says of its models, without where it says so."""
    entries = [(e.model, e.layers, e.level.settings) for e in parsed.entries()]
    return [parsed.references, parsed.base, entries, parsed.budget, parsed.seed]


ENTRIES = st.one_of(
    st.fixed_dictionaries({"model": st.sampled_from(NAMES)}),
    st.fixed_dictionaries({"match": st.sampled_from(("chat-*", "*-a", "code-?", "math", "*"))}),
    st.fixed_dictionaries({"tag": st.just("new")}),
)
WEIGHTS = st.one_of(st.just(0.3), st.just([0.2, 0.8]), st.just([{"filter": "mlp", "value": 0.5}]))


@given(st.lists(st.tuples(ENTRIES, WEIGHTS), min_size=1, max_size=4))
def test_a_recipe_with_selectors_means_what_it_means_with_the_models_written_out(
    drawn: list[tuple[dict[str, str], Any]],
) -> None:
    entries: list[dict[str, Any]] = [
        {**entry, "parameters": {"weight": weight}} for entry, weight in drawn
    ]
    named = {e["model"] for e in entries if "model" in e}
    written: list[dict[str, Any]] = []
    for entry in entries:
        selector = Selector(entry.get("match"), entry.get("tag"))
        names = [n for n in NAMES if fits(selector, n, lambda n: TAGS.get(n, frozenset()))]
        known = named | {w["model"] for w in written}
        found = [entry["model"]] if "model" in entry else [n for n in names if n not in known]
        written += [{"model": n, "parameters": entry["parameters"]} for n in found]
        if not found:
            with pytest.raises(RecipeError, match="takes nothing"):
                parse(entries)
            return
    selecting, plain = parse(entries), parse(written)
    assert meaning(selecting) == meaning(plain)
    again = parse_recipes(
        selecting.text,
        name="r",
        where="r.yml",
        methods=METHODS,
        choose=Recorded(selecting.selected),
    )[-1]
    assert replace(again, lines={}) == replace(selecting, lines={})


def test_a_selection_says_which_selector_took_whom_and_survives_json() -> None:
    parsed = parse([{"match": "*-a", "exclude": ["code-*"]}, {"model": "math"}, {"tag": "new"}])
    first, second = parsed.selected
    assert first.label == "models[0]: match *-a, exclude code-*"
    assert (second.taken, second.left) == (("chat-b",), (("math", "the recipe names it"),))
    assert by_expert(parsed.selected)["chat-b"] == "models[2]: tag new"
    assert [record_of(Selected, asdict(s)) for s in parsed.selected] == [first, second]


def test_what_a_selector_cannot_say_is_told_at_its_line() -> None:
    text = """\
merge_method: ties
base_model: base
models:
- {match: "chat-*", model: math}
- {base: base}
- {parameters: {weight: 1}}
- {match: "chat-a", min_version: 0}
- {match: "", exclude: chat}
- {match: "chat-b", layer_range: [0, 1]}
- {match: "code-*", weight: 1}
"""
    assert [p.split("; known")[0] for p in problems_of(text)] == [
        "line 4, models[0].match: give either `model:` or a selector, not both",
        "line 5, models[1].base: a selector needs `match:`, `tag:` or `run:`",
        "line 6, models[2].model: this key is required and missing; `match:`, `tag:` or `run:` "
        "may replace it",
        "line 7, models[3].min_version: expected greater than or equal to 1, found 0",
        "line 8, models[4].match: expected a text, found ''",
        "line 8, models[4].exclude: expected a valid list, found 'chat'",
        "line 9, models[5].layer_range: whole models are merged under `models:`; use `slices:` to "
        "choose layers",
        "line 10, models[6].weight: `weight` is a parameter of the method; move it under "
        "`parameters:`",
    ]


def test_a_selector_that_takes_nothing_is_the_one_problem_that_is_told_of_its_models() -> None:
    text = "merge_method: ties\nbase_model: base\nmodels:\n- match: chta-*\n"
    (problem,) = problems_of(text)
    assert problem == "line 4, models[0]: the selector (match chta-*) takes nothing: nobody of []"


def test_a_selector_stands_in_whole_models_alone() -> None:
    text = "merge_method: passthrough\nslices:\n- sources: [{match: '*', layer_range: [0, 1]}]\n"
    assert any("unknown key `match`" in p for p in problems_of(text))


def test_a_selector_of_a_stage_never_means_a_stage_and_says_its_stage() -> None:
    text = """\
name: chat-a
merge_method: ties
base_model: base
models: [{match: code-*}]
parameters: {weight: 1}
---
merge_method: ties
base_model: base
models: [{model: chat-a}, {match: chat-*}]
parameters: {weight: 1}
"""
    first, last = parse_recipes(text, name="r", where="r.yml", methods=METHODS, choose=choose)
    assert [s.label for s in last.all_selected] == [
        "chat-a: models[0]: match code-*",
        "models[1]: match chat-*",
    ]
    assert first.selected[0].taken == ("code-a", "code-b")
    assert last.selected[0].taken == ("chat-b",)
    assert last.stages_used == ("chat-a",)
    stage = parse_recipes(
        first.text, name="r", where="r.yml", methods=METHODS, choose=Recorded(first.selected)
    )[-1]
    assert stage.references == first.references
