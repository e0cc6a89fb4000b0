"""Forecasts of recipes and plans: what they count, what they refuse, and where they are told."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.timing.forecast import (
    forecast,
    forecast_plan,
    work_of,
    work_of_plan,
)
from mergepipe_pipeline.timing.time_model import Work
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.profiles import PROFILE, settle_in


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Any]:
    """Runs a command in the warehouse; its answer as text, or parsed for `--json`."""

    def run(*words: object) -> Any:
        args = [*(str(w) for w in words), "--home", str(tmp_path / "warehouse")]
        result = CliRunner().invoke(main, args)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout) if "--json" in words else result.stdout

    return run


@pytest.fixture
def recipe(tmp_path: Path, recipe_text: Callable[..., str]) -> Path:
    path = tmp_path / "mine.yml"
    path.write_text(recipe_text())
    return path


def test_a_fifo_in_the_place_of_a_planned_file_holds_no_forecast_up(
    home: Warehouse, family: Path, tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    folder = tmp_path / "family"
    shutil.copytree(family, folder)
    plan = make_plan(
        home, parse(recipe_text().replace(str(family), str(folder)), name="r", where="r")
    )
    for file in folder.rglob("*.safetensors"):
        file.unlink()
        os.mkfifo(file)
    found: list[Work] = []
    thread = Thread(target=lambda: found.append(work_of_plan(plan)), daemon=True)
    thread.start()
    thread.join(10)
    assert [work.cold_nbytes > 0 for work in found] == [True]


@pytest.mark.parametrize("budget", [None, "50%"])
def test_a_plan_is_foreseen_as_its_recipe_was_once_all_is_known(
    home: Warehouse, recipe_text: Callable[..., str], budget: str | None
) -> None:
    settle_in(home)
    raw = parse(recipe_text(), name="r", where="r")
    first = work_of(resolve(home, raw, budget=budget))
    plan = make_plan(home, raw, budget=budget)
    checked = resolve(home, raw, budget=budget)
    told, planned = work_of(checked), work_of_plan(plan)
    assert first.learn_nbytes > 0
    assert told.learn_nbytes == planned.learn_nbytes == 0
    assert (told.plan_inputs > 0) == (budget is not None)
    for name in ("method", "out_elems", "output_nbytes"):
        assert getattr(told, name) == getattr(planned, name)
    # Blocks are bought whole, up to the budget, and those known to be zero are not read.
    assert planned.expert_elems <= told.expert_elems
    assert planned.cold_nbytes <= told.cold_nbytes
    before, after = forecast(home, checked).seconds, forecast_plan(home, plan).seconds
    assert before is not None
    assert after is not None
    assert (before.start_s, after.start_s, after.planning_s) == (3, 0, 0)
    assert before.merging_s >= after.merging_s


def test_earlier_stages_are_part_of_what_is_foreseen(
    home: Warehouse, family: Path, recipe_text: Callable[..., str]
) -> None:
    settle_in(home)
    one = parse(recipe_text(), name="r", where="r")
    text = f"name: first\n{recipe_text()}---\n" + recipe_text().replace(
        str(family / "expert_00"), "first"
    )
    both = parse(text, name="r", where="r")
    alone, staged = (forecast(home, resolve(home, raw)).seconds for raw in (one, both))
    assert alone is not None
    assert staged is not None
    assert staged.start_s == alone.start_s
    assert staged.total_s > alone.total_s


def test_nothing_is_guessed_without_a_calibration_or_for_a_method_it_lacks(
    home: Warehouse, recipe_text: Callable[..., str]
) -> None:
    ties = resolve(home, parse(recipe_text(), name="r", where="r"))
    assert forecast(home, ties).to_json() == {"reason": "not calibrated: run `mergepipe calibrate`"}
    settle_in(home)
    dare = resolve(home, parse(recipe_text("dare_ties"), name="r", where="r"))
    assert forecast(home, dare).to_json() == {"reason": "calibrate does not measure dare_ties"}


def test_check_tells_the_time_to_people_and_machines(
    ask: Callable[..., Any], home: Warehouse, recipe: Path
) -> None:
    assert "not predicted: not calibrated" in ask("check", recipe)
    assert ask("check", recipe, "--json")["time"].keys() == {"reason"}
    settle_in(home)
    assert "  time                about 3." in ask("check", recipe)
    told = ask("check", recipe, "--json")["time"]
    parts = ("start", "analysis", "planning", "merging")
    assert told["total_s"] == pytest.approx(sum(told[f"{p}_s"] for p in parts), abs=0.01)


def test_merge_stores_what_was_predicted_and_what_came(
    ask: Callable[..., Any], home: Warehouse, recipe: Path
) -> None:
    settle_in(home)
    expected = ask("check", recipe, "--json")["time"]
    done = ask("merge", recipe, "--json")
    kept = json.loads((Path(done["path"]) / "provenance.json").read_text())["body"]["time"]
    assert kept == done["time"]
    assert kept["predicted"]["planning_s"] == expected["planning_s"]
    came = kept["realised"]
    assert came["total_s"] == pytest.approx(came["before_s"] + came["merging_s"], abs=0.002)
    assert came["merging_s"] <= done["wall_s"]
    assert "predicted about" in ask("merge", recipe)


def test_what_was_predicted_changes_no_id(
    ask: Callable[..., Any], home: Warehouse, recipe: Path
) -> None:
    before = ask("merge", recipe, "--json")
    settle_in(home)
    after = ask("merge", recipe, "--json")
    assert before["time"]["predicted"].keys() == {"reason"}
    assert after["time"]["predicted"]["start_s"] == PROFILE.engine.start_s  # type: ignore[union-attr]
    assert after["snapshot_id"] == before["snapshot_id"]
