"""The Python interface gives what the same recipe gives, and refuses what it cannot use."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mergepipe_pipeline import Catalog, Engine, Planner
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.errors import BudgetError, MergePipeError, RecipeError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.warehouse import Warehouse


def planned(home: Warehouse, family: Path, **asked: Any) -> MergePlan:
    experts = [str(family / f"expert_{i:02d}") for i in range(2)]
    given = {"base_model": str(family / "base"), "experts": experts, **asked}
    return Planner(Catalog(home.root)).plan(**given)


def by_recipe(home: Warehouse, family: Path, method: str, parameters: str) -> MergePlan:
    models = "".join(f"- {{model: {family}/expert_{i:02d}}}\n" for i in range(2))
    text = f"merge_method: {method}\nbase_model: {family}/base\nmodels:\n{models}"
    return make_plan(home, parse(f"{text}parameters: {parameters}\n", name="r", where="r"))


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "linear"])
@pytest.mark.parametrize("weight", [0.3, [1.0, 0.1]])
def test_a_weight_for_all_is_what_it_is_in_a_recipe(
    home: Warehouse, family: Path, method: str, weight: object
) -> None:
    found = planned(home, family, operator=method, parameters={"weight": weight})
    assert found.plan_id == by_recipe(home, family, method, f"{{weight: {weight}}}").plan_id
    one = planned(home, family, operator=method)
    assert one.plan_id == planned(home, family, operator=method, weights=[1, 1]).plan_id
    assert one.plan_id != found.plan_id
    snapshot_id, manifest = Engine(Catalog(home.root)).execute(found)
    assert manifest.snapshot_id == snapshot_id


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        ({"weights": [1.0]}, RecipeError, "2, one per expert"),
        ({"weights": [1.0, 1.0, 1.0]}, RecipeError, "found 3"),
        ({"weights": [1, 1], "parameters": {"weight": 1}}, RecipeError, "one of both"),
        ({"experts": ["math", None]}, RecipeError, "experts, entry 1"),
        ({"budget_mb": math.nan}, BudgetError, "nanMB"),
        ({"budget_mb": math.inf}, BudgetError, "infMB"),
        ({"budget_mb": -1}, BudgetError, "-1MB"),
        ({"budget_mb": "10%"}, BudgetError, "10%MB"),
        ({"budget_mb": True}, BudgetError, "TrueMB"),
        ({"budget_mb": [1]}, BudgetError, "budget_mb"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    home: Warehouse, family: Path, asked: dict[str, Any], error: type[MergePipeError], told: str
) -> None:
    with pytest.raises(error) as refused:
        planned(home, family, operator="task_arithmetic", **asked)
    assert told in str(refused.value)
