"""An expert that a recipe knows by name and that lies outside the inbox is watched all the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline.deploy.inbox import scan_inbox
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, known_experts
from tests.dagster_layer.test_experts import jobs, sum_of
from tests.dagster_layer.test_release import error_of, materialise

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@pytest.fixture
def outside(home: Warehouse, drop: Drop, family: Path, tmp_path: Path, ticker: Ticker) -> Path:
    """The folder of `far`, an expert of recipe n, which is released."""
    folder = tmp_path / "models" / "far"
    shutil.copytree(family / "expert_01", folder)
    register(home, folder, "far")
    drop("base")
    home.recipe_path("n").write_text(sum_of("base", "far"))
    assert jobs(ticker.tick()) == ["base", "far", "merge_n"]
    assert ticker.tick() == []
    return folder


def test_an_expert_outside_the_inbox_that_changes_is_indexed_and_merged_anew(
    home: Warehouse, outside: Path, ticker: Ticker, instance: dg.DagsterInstance, family: Path
) -> None:
    shutil.rmtree(outside)
    shutil.copytree(family / "expert_00", outside)
    assert "far waits for its index" in error_of(materialise(home, instance, "plan"))
    assert jobs(ticker.tick()) == ["far", "merge_n"]
    assert ticker.tick() == []
    assert set(known_experts(instance, home)) == {"base", "far"}


def test_an_expert_outside_the_inbox_waits_while_it_is_half_replaced(
    home: Warehouse, outside: Path, ticker: Ticker, family: Path, instance: dg.DagsterInstance
) -> None:
    shard = "model-00001-of-00002.safetensors"
    first = (outside / shard).read_bytes()
    (outside / shard).write_bytes(first[:-1] + bytes([first[-1] ^ 1]))
    patient = Ticker(home, instance, quiet_s=3600)
    assert patient.tick() == []
    inbox, recipes = patient.reasons()
    assert "far: its files changed" in inbox
    assert "n: far waits for its index" in recipes


def test_an_expert_that_moves_into_the_inbox_is_indexed_where_it_lies(
    home: Warehouse, outside: Path, ticker: Ticker
) -> None:
    shutil.copytree(outside, home.inbox / "far")  # with the same times and sizes
    assert jobs(ticker.tick()) == ["far"]
    shutil.rmtree(outside)
    assert ticker.tick() == []
    assert "n: the release is current" in ticker.reasons()[1]


def test_an_expert_outside_the_inbox_that_no_recipe_names_is_not_looked_at(
    home: Warehouse, outside: Path, tmp_path: Path, family: Path
) -> None:
    register(home, family / "expert_02", "other")
    assert [x.name for x in scan_inbox(home, 0.0)] == ["base", "far"]


def test_a_recipe_that_gives_a_path_says_how_to_give_a_name(home: Warehouse, family: Path) -> None:
    home.recipe_path("n").write_text(sum_of("base", str(family / "expert_00")))
    (recipe_file,) = recipe_files(home)
    assert recipe_file.problem is not None
    assert f"`mergepipe register {family / 'expert_00'} --name NAME`" in recipe_file.problem
    assert "NAME in the recipe" in recipe_file.problem
