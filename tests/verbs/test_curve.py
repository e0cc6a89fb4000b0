"""Budget curves of recipes: learned once, then told without reading a weight."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.planner.budget_curve import SHARES
from mergepipe_pipeline.planner.strategies import PACKS, STRATEGIES
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.curve import curve, curve_of_plan, records, rows_of
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import write_adapter
from tests.support.reads import tensor_reads

pytestmark = pytest.mark.usefixtures("baselines")

Text = Callable[..., str]


def raw_of(text: str) -> ParsedRecipe:
    return parse(text, name="test", where="test")


def test_experts_are_read_once_to_learn_and_never_for_a_second_curve(
    home: Warehouse, recipe_text: Text
) -> None:
    raw = raw_of(recipe_text(extra="budget: 30%"))
    names = tuple(f"expert_{i:02d}" for i in range(4))
    assert curve(home, raw).read == names
    with tensor_reads() as reads:
        again = curve(home, raw)
    assert (again.read, reads.total()) == ((), 0)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
@pytest.mark.parametrize("strategy", ["magnitude", "drop-experts"])
def test_the_chosen_point_is_what_the_plan_promises(
    home: Warehouse, recipe_text: Text, method: str, strategy: str
) -> None:
    raw = raw_of(recipe_text(method, parameters=""))
    e = plan_in_stages(home, raw, budget="30%", strategy=strategy).estimates
    chosen = curve(home, raw, budget="30%", strategy=strategy).curve.chosen
    assert (chosen.strategy, chosen.budget_bytes) == (e.strategy, e.budget_bytes)
    assert chosen.nbytes == e.expert_bytes_planned
    assert chosen.error == pytest.approx(e.predicted_error)
    assert chosen.bound == pytest.approx(e.error_bound)


def test_a_plan_stands_on_the_curve_of_its_recipe_even_when_its_experts_are_gone(
    home: Warehouse, tmp_path: Path, family: Path, recipe_text: Text
) -> None:
    copied = tmp_path / "models"
    shutil.copytree(family, copied)
    text = recipe_text(extra="budget: 30%").replace(str(family), "models")
    plan = plan_in_stages(home, raw_of(text), relative_to=tmp_path)
    wanted = curve(home, raw_of(text), relative_to=tmp_path)
    for expert in copied.glob("expert_*"):
        shutil.rmtree(expert)
    with tensor_reads() as reads:
        found = curve_of_plan(home, plan)
    assert found is not None
    assert found.curve == wanted.curve
    assert reads.total() == 0


def test_plans_over_adapters_and_stages_are_asked_again(
    home: Warehouse, tmp_path: Path, family: Path
) -> None:
    adapter = write_adapter(tmp_path / "lora", 0)
    weighted = "parameters: {weight: 0.5}"
    stage = (
        f"name: one\nmerge_method: task_arithmetic\nbase_model: {family}/base\nmodels:\n"
        f"- {{model: {family}/expert_00, {weighted}}}\n"
        f"- {{model: {family}/base+{adapter}, {weighted}}}\n"
    )
    last = (
        f"merge_method: task_arithmetic\nbase_model: {family}/base\nbudget: 40%\nmodels:\n"
        f"- {{model: one, {weighted}}}\n- {{model: {adapter}, {weighted}}}\n"
        f"- {{model: {family}/expert_01+{adapter}, {weighted}}}\n"
    )
    raw = raw_of(f"{stage}---\n{last}")
    wanted = curve(home, raw)
    found = curve_of_plan(home, plan_in_stages(home, raw))
    assert found is not None
    assert found.curve == wanted.curve


def test_plans_on_a_base_with_an_adapter_are_asked_again(
    home: Warehouse, tmp_path: Path, family: Path
) -> None:
    adapter = write_adapter(tmp_path / "lora", 0)
    raw = raw_of(
        f"merge_method: task_arithmetic\nbase_model: {family}/base+{adapter}\nbudget: 40%\n"
        f"models:\n- {{model: {family}/expert_00, parameters: {{weight: 1}}}}\n"
        f"- {{model: {family}/expert_01+{adapter}, parameters: {{weight: 1}}}}\n"
    )
    found = curve_of_plan(home, plan_in_stages(home, raw))
    assert found is not None
    assert found.curve == curve(home, raw).curve


def test_without_a_base_there_is_no_curve(home: Warehouse, recipe_text: Text) -> None:
    raw = raw_of(recipe_text("linear", parameters="", base=False))
    assert curve_of_plan(home, plan_in_stages(home, raw)) is None
    with pytest.raises(BudgetError, match="needs a base model"):
        curve(home, raw)


def test_tables_and_records_hold_every_budget_and_strategy(
    home: Warehouse, recipe_text: Text
) -> None:
    found = curve(home, raw_of(recipe_text(extra="budget: 30%"))).curve
    headers, rows = rows_of(found)
    assert {*STRATEGIES} - {PACKS} <= set(headers)
    assert [r[0] for r in rows] == [f"{round(100 * s, 2):g} %" for s in SHARES]
    assert [r[-1] for r in rows].count("knee") == (found.knee is not None)
    *points, chosen = records(found)
    assert len(points) == (len(STRATEGIES) - 1) * len(SHARES)
    assert [p["is_chosen"] for p in points] == [False] * len(points)
    assert chosen["is_chosen"]
    assert chosen["error_relative"] == pytest.approx(found.chosen.error / found.update_norm)


def test_budgets_that_only_packs_can_meet_are_in_the_table_and_smaller_ones_are_named(
    home: Warehouse, family: Path, recipe_text: Text
) -> None:
    register(home, family / "base")
    for expert in sorted(family.glob("expert_*")):
        register(home, expert, None, "base")
    pack(home, ["expert_00", "expert_01"])
    raw = raw_of(recipe_text(extra="budget: {limit: 60%, pin: [expert_00, expert_01]}"))
    told = curve(home, raw, shares=(0.001, 0.35, 0.6), strategy="magnitude")
    headers, rows = rows_of(told.curve)
    cells = {row[0]: dict(zip(headers, row, strict=True)) for row in rows}
    assert list(cells) == ["35 %", "60 %", "100 %"]
    assert cells["35 %"]["magnitude"] == cells["35 %"]["bound of magnitude"] == "-"
    assert "%" in cells["35 %"]["packs"]
    assert "%" in cells["60 %"]["magnitude"]
    (warning,) = (w for w in told.warnings if "pins" in w)
    assert "more than 0.1 % of the bytes" in warning
