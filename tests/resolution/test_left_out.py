"""A recipe without one of its models gives what the recipe gives that never named it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.replay import replay
from mergepipe_pipeline.warehouse import Warehouse

Text = Callable[..., str]


def _plan(home: Warehouse, text: str, *left_out: str) -> MergePlan:
    return make_plan(home, parse(text, name="r", where="r.yml"), left_out=left_out)


@pytest.mark.parametrize("method", ["ties", "task_arithmetic", "linear"])
def test_leaving_the_last_model_out_is_the_recipe_without_it(
    home: Warehouse, recipe_text: Text, method: str
) -> None:
    base = method != "linear"
    parameters = "{density: 0.3}" if method == "ties" else ""
    three, two = (recipe_text(method, parameters, experts=n, base=base) for n in (3, 2))
    left_out = _plan(home, three, "expert_02")
    assert left_out.plan_id == _plan(home, two).plan_id
    assert "expert_02" not in {source.name for source in left_out.sources}


def test_the_others_keep_the_positions_that_address_random_numbers(
    home: Warehouse, recipe_text: Text
) -> None:
    plan = _plan(home, recipe_text("dare_ties", "{density: 0.5}", experts=3), "expert_00")
    assert {e.position for x in plan.layers for t in x.tasks for e in t.experts} == {1, 2}


def test_a_merge_without_a_model_can_be_replayed(home: Warehouse, recipe_text: Text) -> None:
    plan = _plan(home, recipe_text("task_arithmetic", "", experts=2), "expert_00")
    made = run_plan(home, plan, is_stage=True).snapshot
    assert replay(home, made.snapshot_id).snapshot_id == made.snapshot_id


def test_the_last_model_leaves_the_base(home: Warehouse, recipe_text: Text) -> None:
    plan = _plan(home, recipe_text("task_arithmetic", "", experts=1), "expert_00")
    assert {t.operator for x in plan.layers for t in x.tasks} == {"copy"}


@pytest.mark.parametrize(
    ("method", "experts", "name", "told"),
    [
        ("model_stock", 2, "expert_01", "at least 2 models"),
        ("task_arithmetic", 2, "base", "another base model"),
    ],
)
def test_what_a_recipe_needs_cannot_be_left_out(
    home: Warehouse, recipe_text: Text, method: str, experts: int, name: str, told: str
) -> None:
    with pytest.raises(RecipeError, match=told):
        _plan(home, recipe_text(method, "", experts=experts), name)
