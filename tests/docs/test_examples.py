"""The examples do what their pages say."""

from __future__ import annotations

import json
import runpy
import shutil
from io import StringIO
from pathlib import Path

import pytest

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
