"""A merge that changes less than somebody may think says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.check import check
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import tensors_of, write_model
from tests.support.told import Told


def text_of(folder: Path, *experts: str) -> str:
    models = ", ".join(f"{{model: {folder}/{name}}}" for name in experts)
    return (
        f"merge_method: task_arithmetic\nbase_model: {folder}/base\n"
        f"models: [{models}]\nparameters: {{weight: 0.5}}\ndtype: bfloat16\n"
    )


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for expert, name in ((None, "base"), (1, "math"), (None, "same")):
        write_model(tmp_path / name, tensors_of(0, expert))
    return tmp_path


def warnings_of(models: Path, *experts: str, budget: str | None = None) -> list[str]:
    told, home = Told(), Warehouse.at(models / "home")
    recipe = parse(text_of(models, *experts), name="m", where="m.yml")
    merge(home, recipe, progress=told, budget=budget)
    return [w for w in told.warnings if "equals the base" in w or "too small" in w]


def test_an_expert_that_equals_the_base_is_named(models: Path) -> None:
    assert warnings_of(models, "math", "same") == [
        "same equals the base in all that is merged: it adds nothing"
    ]


def test_a_model_that_equals_the_base_counts_among_values(models: Path) -> None:
    text = text_of(models, "math", "same").replace("task_arithmetic", "linear")
    told, home = Told(), Warehouse.at(models / "home")
    merge(home, parse(text, name="m", where="m.yml"), progress=told)
    assert not any("adds nothing" in w for w in told.warnings)


def test_packs_that_are_asked_for_and_not_there_are_said(models: Path) -> None:
    told, home = Told(), Warehouse.at(models / "home")
    recipe = parse(text_of(models, "math"), name="m", where="m.yml")
    merge(home, recipe, progress=told, budget="50%", strategy="packs")
    assert any("no expert has a pack" in w and "`mergepipe pack`" in w for w in told.warnings)


def test_a_check_counts_as_a_plan_does_what_a_budget_keeps_of_the_base(models: Path) -> None:
    text = text_of(models, "math") + "budget: {limit: 20%, keep: ['*.layers.0.*']}\n"
    home = Warehouse.at(models / "home").ensure()
    recipe = parse(text, name="m", where="m.yml")
    found, plan = check(home, recipe), plan_in_stages(home, recipe)
    promised = plan.estimates
    assert found.stages[-1].cost.expert_bytes_total == promised.expert_bytes_total
    assert found.stages[-1].cost.budget_bytes == promised.budget_bytes
    assert any(t.operator == "copy" for layer in plan.layers for t in layer.tasks)


def test_a_budget_that_buys_nothing_is_said(models: Path) -> None:
    assert warnings_of(models, "math") == []
    assert warnings_of(models, "math", budget="0.0001%") == [
        "the budget is too small for any block of any expert: the result is the base"
    ]


def test_the_strategy_of_packs_and_no_packs_contradict_each_other(models: Path) -> None:
    recipe = models / "m.yml"
    recipe.write_text(text_of(models, "math"))
    words = ["check", str(recipe), "--strategy", "packs", "--no-packs"]
    done = CliRunner().invoke(main, [*words, "--home", str(models / "home")])
    assert done.exit_code == 2
    assert "give one of them" in done.output


def test_what_has_no_effect_in_a_stage_or_a_curve_is_said_by_every_verb(models: Path) -> None:
    stage = text_of(models, "math").replace("weight: 0.5", "weight: 0.5, density: 0.5")
    last = text_of(models).replace("models: []", "models: [{model: one}]")
    path = models / "m.yml"
    path.write_text(f"name: one\nbudget: 50%\n{stage}---\n{last}")
    for verb in ("check", "plan", "curve", "merge"):
        command = ["--home", str(models / verb), verb, str(path)]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.stderr
        assert done.stderr.count("stage one: budget has no effect") == 1, verb
        assert done.stderr.count("density has no effect") == 1, verb
