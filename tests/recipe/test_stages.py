"""Several recipes in one file: what each uses, what the last decides, and in which order."""

from __future__ import annotations

import pytest

from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.errors import BudgetError, RecipeError
from mergepipe_pipeline.recipe.parse import parse_recipes
from mergepipe_pipeline.recipe.yaml_text import read_yaml
from tests.recipe.schemas import METHODS
from tests.recipe.synthetic import parse_all

FIRST = "name: first\nmerge_method: linear\nmodels: [{model: a}]\nparameters: {weight: 1}\n"
LAST = """\
merge_method: ties
base_model: base
models: [{model: first}, {model: {model: {path: first}, lora: {path: x}}}, {model: b}]
parameters: {weight: 1}
budget: 25%
ref: prod
schedule: 0 4 * * *
"""


def _problems(text: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError, match="nothing was read or written") as caught:
        parse_all(text)
    return caught.value.problems


def test_a_stage_is_used_by_its_name_with_an_adapter_too() -> None:
    first, last = parse_all(FIRST + "---\n" + LAST)
    assert (first.stage, first.name, first.stages_used) == ("first", "first", ())
    assert (last.stage, last.name, last.stages_used) == (None, "demo", ("first",))
    assert last.before == (first,)
    assert last.references[0].text == "first"


def test_the_last_recipe_decides_on_budget_ref_and_schedule_of_all() -> None:
    first, last = parse_all(FIRST + "budget: 10%\n---\n" + LAST)
    for stage in (first, last):
        assert (stage.budget, stage.ref) == (Budget(fraction=0.25), "prod")
        assert stage.schedule == "0 4 * * *"
    assert first.warnings == (
        "stage first: budget has no effect; the last recipe of the file gives it",
    )


def test_each_stage_keeps_its_own_text() -> None:
    first, last = parse_all("# the mean\n" + FIRST + "---\n" + LAST)
    again = parse_recipes(first.text, name="demo", where="x", methods=METHODS)[-1]
    assert (again.method, again.references) == (first.method, first.references)
    assert last.text.startswith("merge_method: ties")


def test_a_name_of_no_stage_is_a_model() -> None:
    (raw,) = parse_all(FIRST)
    assert (raw.stage, raw.name, raw.stages_used) == ("first", "demo", ())
    assert parse_all(FIRST + "---\n" + FIRST.replace("first", "last"))[1].stages_used == ()


def test_problems_of_all_stages_are_told_at_once_with_lines_of_the_file() -> None:
    text = FIRST.replace("weight", "wieght") + "---\n" + LAST.replace("prod", "1/2")
    assert [p.split(": ")[0] for p in _problems(text)] == [
        "line 4, parameters.wieght",
        "line 11, ref",
    ]


def test_a_wrong_budget_of_a_single_recipe_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match=r"Where: demo\.yml, key budget"):
        parse_all(FIRST + "budget: lots\n")


def test_one_document_is_asked_for_where_one_is_read() -> None:
    (problem,) = read_yaml(FIRST + "---\n" + LAST).problems.sentences()
    assert "the file has 2 documents" in problem


def test_the_word_base_is_no_stage() -> None:
    text = FIRST.replace("name: first", "name: base") + "---\n" + LAST
    text = text.replace("base_model: base", "base_model: ground")
    assert parse_all(text + "tokenizer_source: base\n")[1].stages_used == ()
