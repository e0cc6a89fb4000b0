"""A run's folder lands step by step: whole ones, once, and again where a step is another now."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.verbs.runs import holds_run, land_run, register_run
from mergepipe_pipeline.warehouse import Warehouse


@pytest.fixture
def run(family: Path, tmp_path: Path) -> Path:
    """A run's folder as trainers leave one: two whole steps, one half written, more."""
    folder = tmp_path / "math"
    for i, step in enumerate(("checkpoint-900", "checkpoint-1000", "checkpoint-1100")):
        shutil.copytree(family / f"expert_{i:02d}", folder / step)
    (folder / "checkpoint-900" / "optimizer.pt").write_bytes(b"state")
    for weights in (folder / "checkpoint-1100").glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    (folder / "runs").mkdir()
    (folder / "trainer_state.json").write_text("{}")
    return folder


@pytest.mark.parametrize("link", [True, False])
def test_every_whole_step_lands_once_in_order(home: Warehouse, run: Path, link: bool) -> None:
    first = land_run(home, run, link=link)
    assert first.new == ("math.step-900", "math.step-1000")
    assert not (home.inbox / "math.step-900" / "optimizer.pt").exists()
    assert [name for name, _ in first.left_out] == ["runs", "checkpoint-1100"]
    assert land_run(home, run, link=link).there == ("math.step-900", "math.step-1000")
    for weights in (run / "checkpoint-900").glob("*.safetensors"):
        data = weights.read_bytes()
        weights.unlink()  # a trainer that begins again writes new files
        weights.write_bytes(data[:-2] + b"\1\2")
    again = land_run(home, run, link=link)
    assert (again.new, again.there) == (("math.step-900",), ("math.step-1000",))


def test_a_run_is_registered_where_it_lies_and_again_with_each_new_step(
    home: Warehouse, run: Path, family: Path
) -> None:
    first = register_run(home, run, "m")
    assert first.new == ("m.step-900", "m.step-1000")
    assert [folder for folder, _ in first.left_out] == ["runs", "checkpoint-1100"]
    assert home.catalog.root("m.step-900") == str(run / "checkpoint-900")
    shutil.copytree(family / "expert_02", run / "checkpoint-1100", dirs_exist_ok=True)
    again = register_run(home, run, "m")
    assert again.new == ("m.step-1100",)
    assert again.there == first.new


def test_two_folders_of_one_step_and_a_folder_without_steps_are_refused_before_any_lands(
    home: Warehouse, run: Path
) -> None:
    shutil.copytree(run / "checkpoint-900", run / "step_0900")
    with pytest.raises(MergePipeError, match="checkpoint-900 and step_0900, which are one step"):
        land_run(home, run)
    with pytest.raises(MergePipeError, match="no such folder"):
        land_run(home, run / "runs")
    assert not list(home.inbox.iterdir())


def test_a_link_that_leads_to_itself_is_no_step(run: Path) -> None:
    (run / "checkpoint-1200").symlink_to("checkpoint-1200")
    assert holds_run(run)


def test_a_model_beside_its_steps_lands_as_before_unless_the_run_is_asked_for(
    home: Warehouse, run: Path, family: Path
) -> None:
    assert holds_run(run)
    shutil.copytree(family / "expert_03", run, dirs_exist_ok=True)
    assert not holds_run(run)
    command = ["land", str(run), "--home", str(home.root), "--json"]
    said = CliRunner().invoke(main, command, catch_exceptions=False)
    assert json.loads(said.output)["name"] == "math"
    said = CliRunner().invoke(main, [*command, "--run", "--name", "m"], catch_exceptions=False)
    assert json.loads(said.output)["new"] == ["m.step-900", "m.step-1000"]
    assert sorted(os.listdir(home.inbox)) == ["m.step-1000", "m.step-900", "math"]
