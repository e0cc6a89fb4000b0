"""The command `conflicts`: tables, JSON, CSV and a picture of the same figures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from tests.support.reads import tensor_reads

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def conflicts(tmp_path: Path, recipe_text: Callable[..., str]) -> Callable[..., str]:
    """Runs the command on a recipe of four experts and gives its output."""
    recipe = tmp_path / "mine.yml"
    recipe.write_text(recipe_text())

    def run(*options: object, of: Path = recipe) -> str:
        words = ["conflicts", str(of), "--home", str(tmp_path / "w"), *map(str, options)]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


def test_people_see_matrices_a_profile_and_the_worst_pairs(conflicts: Callable[..., str]) -> None:
    shown = conflicts()
    assert "mine: 4 experts" in shown
    for title in ("cosines", "elements moved the same way", "interference"):
        assert title in shown
    assert [line for line in shown.splitlines() if line.startswith("layer.01 ")]
    assert "redundant pairs: none" in shown


@pytest.mark.parametrize("by", ["layer", "tensor"])
def test_json_holds_every_pair_in_every_place_with_its_error(
    conflicts: Callable[..., str], by: str
) -> None:
    (stage,) = json.loads(conflicts("--json", "--by", by))["stages"]
    pairs = [(i, j) for j in range(4) for i in range(j)]
    for found in (stage["all"], *stage[by].values()):
        assert all(abs(found["cosine"][i][j]) <= 1 for i, j in pairs)
        assert all(found["cosine_error"][i][j] > 0 for i, j in pairs)


def test_an_expert_and_its_copy_are_redundant(
    conflicts: Callable[..., str], tmp_path: Path, family: Path
) -> None:
    shutil.copytree(family / "expert_00", tmp_path / "copy")
    recipe = tmp_path / "twice.yml"
    models = "".join(f"  - model: {m}\n" for m in (family / "expert_00", tmp_path / "copy"))
    recipe.write_text(
        f"merge_method: task_arithmetic\nbase_model: {family / 'base'}\n"
        f"models:\n{models}parameters: {{weight: 0.5}}\n"
    )
    (stage,) = json.loads(conflicts("--json", of=recipe))["stages"]
    assert [(p["first"], p["second"]) for p in stage["redundant"]] == [("expert_00", "copy")]
    assert stage["all"]["interference"] == pytest.approx(-1)


def test_no_weight_is_read_once_experts_are_analysed(conflicts: Callable[..., str]) -> None:
    with tensor_reads() as reads:
        first = conflicts("--json")
    assert reads
    with tensor_reads() as reads:
        assert conflicts("--json") == first
    assert not reads


def test_the_picture_is_a_png_file(conflicts: Callable[..., str], tmp_path: Path) -> None:
    conflicts("--picture", tmp_path / "pictures" / "c.png")
    assert (tmp_path / "pictures" / "c.png").read_bytes().startswith(PNG)


def test_several_stages_have_a_report_each_and_one_picture(
    conflicts: Callable[..., str], tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    recipe = tmp_path / "stages.yml"
    first = recipe_text(experts=2, extra="name: first\n")
    recipe.write_text(f"{first}---\n{recipe_text(experts=3)}")
    stages = json.loads(conflicts("--json", "--picture", tmp_path / "c.png", of=recipe))["stages"]
    assert [(s["stage"], len(s["experts"])) for s in stages] == [("first", 2), ("stages", 3)]
    assert (tmp_path / "c.png").read_bytes().startswith(PNG)


def test_a_recipe_without_a_base_has_nothing_to_compare(
    conflicts: Callable[..., str], tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    recipe = tmp_path / "linear.yml"
    recipe.write_text(recipe_text(method="linear", parameters="{}", base=False))
    assert conflicts(of=recipe).startswith("nothing to compare")
    assert json.loads(conflicts("--json", of=recipe)) == {"stages": []}
