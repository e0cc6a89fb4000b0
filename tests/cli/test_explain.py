"""`curve`, `explain` and `compare` as a person and as a machine would use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import NotFoundError

PNG = b"\x89PNG\r\n\x1a\n"
NORM = "model.norm.weight"
Call = Callable[..., Result]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Runs a command in one warehouse."""

    def run(*words: object, code: int = 0) -> Result:
        args = [*(str(w) for w in words), "--home", str(tmp_path / "w")]
        result = CliRunner().invoke(main, args)
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def recipe(tmp_path: Path, recipe_text: Callable[..., str]) -> Path:
    path = tmp_path / "mine.yml"
    path.write_text(recipe_text(extra="budget: 30%"))
    return path


def told(result: Result) -> Any:
    return json.loads(result.stdout)


def test_a_curve_is_a_table_a_record_and_a_picture(
    call: Call, recipe: Path, tmp_path: Path
) -> None:
    text = call("curve", recipe).stdout
    assert "analysed first: expert_00, expert_01, expert_02, expert_03" in text
    assert "chosen  magnitude" in text, "the recipe merges by votes"
    picture = tmp_path / "out" / "c.png"
    found = told(call("curve", recipe, "--at", "5,25%", "--picture", picture, "--json"))
    assert found["analysed"] == []
    assert {p["budget_bytes"] for p in found["points"]} == {
        int(s * found["expert_bytes_total"]) for s in (0, 0.05, 0.25, 1)
    }
    assert picture.read_bytes().startswith(PNG)
    planned = told(call("plan", recipe, "--json"))
    assert found["chosen"]["error"] == planned["predicted_error"]
    assert found["chosen"]["bound"] == planned["error_bound"]


@pytest.mark.parametrize("shares", ["1,x", "101", "-1"])
def test_budgets_that_are_no_percents_are_refused(call: Call, recipe: Path, shares: str) -> None:
    assert "percent" in call("curve", recipe, "--at", shares, code=2).stderr


def test_a_plan_is_a_table_a_record_and_a_picture(call: Call, recipe: Path, tmp_path: Path) -> None:
    plan = told(call("plan", recipe, "--json"))
    shown = call("explain", plan["plan_id"][:12], "--by", "tensor").stdout
    assert "error bound" in shown
    assert NORM in shown
    picture = tmp_path / "t.png"
    words = ("explain", plan["plan_id"], "--by", "layer", "--picture", picture)
    found = told(call(*words, "--json"))
    assert (found["plan_id"], found["snapshot_id"]) == (plan["plan_id"], None)
    assert {s["expert"] for s in found["shares"]} == {f"expert_0{n}" for n in range(4)}
    assert picture.read_bytes().startswith(PNG)


def test_from_a_merge_to_what_it_lost(call: Call, recipe: Path) -> None:
    part = told(call("merge", recipe, "--json"))
    assert part["predicted_error"] <= part["error_bound"]
    assert "error         " in call("merge", recipe).stdout
    call("compare", part["snapshot_id"], code=NotFoundError.exit_code)
    assert "`mergepipe compare` measures it" in call("explain", part["snapshot_id"]).stdout
    full = told(call("merge", recipe, "--budget", "none", "--json"))
    found = told(call("compare", part["snapshot_id"], "--json"))
    assert 0 < found["error"] <= found["update"]
    assert "error of the update" in call("compare", part["snapshot_id"], full["snapshot_id"]).stdout
    story = told(call("explain", part["snapshot_id"], "--json"))
    assert {r["figure"]: r["realised"] for r in story["figures"]}["error"] == found["error"]
    assert "this is the full merge" in call("explain", full["snapshot_id"]).stdout


def test_a_check_ends_with_what_selectors_take(call: Call, family: Path, tmp_path: Path) -> None:
    for name in ("base", "expert_00"):
        call("register", family / name)
    recipe = tmp_path / "r.yml"
    recipe.write_text(
        "merge_method: linear\nmodels: [{match: 'expert_*', parameters: {weight: 1}}]\n"
    )
    lines = call("check", recipe).stdout.splitlines()
    (when,) = (i for i, line in enumerate(lines) if "standing pipeline" in line)
    (table,) = (i for i, line in enumerate(lines) if line.startswith("selector "))
    assert when < table
