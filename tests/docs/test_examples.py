"""The examples do what their pages say."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from io import StringIO
from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline.dagster import door
from tests.dagster_layer.daemon import dg_program
from tests.dagster_layer.test_existing_project import Project, all_done
from tests.docs.page import DOCS, ROOT, blocks, mergepipe, run_page

EXAMPLES = DOCS / "examples"


@pytest.mark.parametrize("name", ["quickstart", "lora", "budget", "search"])
def test_an_example_prints_what_its_page_shows(name: str, models: Path) -> None:
    run_page(EXAMPLES / name / "README.md")


def test_every_example_is_tested_and_listed() -> None:
    folders = {p.name for p in EXAMPLES.iterdir() if p.is_dir()}
    assert folders == {"quickstart", "lora", "budget", "search", "dagster"}
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"]({name}/README.md)" in listed for name in folders)


@pytest.mark.filterwarnings("ignore::Warning")
def test_the_dagster_example_indexes_what_lands_and_releases_its_merge(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe, land, look, history) = blocks(EXAMPLES / "dagster" / "README.md")
    Path(recipe.title).parent.mkdir(parents=True)
    Path(recipe.title).write_text(recipe.text)
    for line in land.text.splitlines():
        mergepipe(line)
    home = models / "warehouse"
    monkeypatch.setenv("MERGEPIPE_HOME", str(home))
    monkeypatch.setenv("DAGSTER_HOME", str(home / "dagster"))
    (home / "dagster").mkdir()
    shutil.copy(ROOT / "mergepipe_pipeline" / "dagster.yaml", home / "dagster")
    assert look.text.splitlines()[-1] == "echo | python -m mergepipe_pipeline.tick"
    monkeypatch.setattr("sys.stdin", StringIO("\n"))
    capsys.readouterr()
    runpy.run_module("mergepipe_pipeline.tick", run_name="__main__")
    runs = json.loads(capsys.readouterr().out)
    assert [r["job"] for r in runs] == 2 * ["index_experts"] + ["merge_both"]
    assert all(r["success"] for r in runs)
    assert "recipe both" in mergepipe(history.text)


#: What `dg` is told of the project of the page.
PROJECT = """[project]
name = "shop"
version = "0"
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "shop"
code_location_target_module = "shop.definitions"
"""


@pytest.mark.filterwarnings("ignore::Warning")
def test_the_project_of_its_page_is_clean_and_releases_what_it_trains(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "spreading", lambda: lambda context: True)

    def checked_and_run(line: str) -> str:
        Path("pyproject.toml").write_text(PROJECT)
        Path("shop/__init__.py").touch()
        if program := dg_program():
            check = [program, "check", "defs", "--use-active-venv"]
            done = subprocess.run(check, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stdout + done.stderr
        with dg.DagsterInstance.ephemeral() as instance:
            project = Project(instance, runpy.run_path("shop/definitions.py")["defs"])
            assert project.make("training/math", "training/code").success
            assert len(all_done(project.tick("mergepipe_landing_sensor"))) == 2
            while not (merged := project.tick("mergepipe_recipe_sensor")):
                project.tick("mergepipe_inbox_sensor")
            assert all_done(merged) == ["mergepipe_merge_both"]
        return mergepipe(line)

    run_page(DOCS / "existing-project.md", checked_and_run)
    (test,) = (b.text for b in blocks(DOCS / "existing-project.md") if b.title.startswith("tests/"))
    assert len(test.split("\n\n\n")[1].splitlines()) <= 10
    runpy.run_path("tests/test_both.py")["test_the_gate_keeps_a_bad_merge_back"](Path("tested"))
