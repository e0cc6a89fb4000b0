"""What the README says is run: its Python, its recipe, its commands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from mergepipe_pipeline import errors
from mergepipe_pipeline.cli.main import main
from tests.dagster_layer.daemon import dg_program
from tests.family import write_adapter

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.fixture
def models(tmp_path: Path, family: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the models and the adapter that the README has."""
    (tmp_path / "models").mkdir()
    for name, source in (("base", "base"), ("math", "expert_00"), ("code", "expert_01")):
        os.symlink(family / source, tmp_path / "models" / name)
    write_adapter(tmp_path / "adapters" / "code", 0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_example_runs(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out.split()
    assert re.fullmatch("[0-9a-f]{64}", printed[0])
    assert printed[3].startswith(printed[2])


def test_the_recipe_example_merges_with_the_command_shown(models: Path) -> None:
    (recipe,) = blocks("yaml")
    (models / "recipe.yml").write_text(recipe)
    assert yaml.safe_load(recipe)["merge_method"] == "ties"
    command = next(line for line in TEXT.splitlines() if line.startswith("mergepipe merge "))
    result = CliRunner().invoke(main, command.split()[1:])
    assert result.exit_code == 0, result.output
    assert (models / "merged" / "config.json").exists()


def test_every_command_and_option_in_the_table_exists() -> None:
    for line in re.findall(r"^\| `mergepipe .*?\|", TEXT.replace("\\|", "/"), flags=re.MULTILINE):
        for name, options in re.findall(r"mergepipe (\w+)([^`]*)`", line):
            command = main.commands[name]
            known = {o for p in command.params for o in p.opts}
            assert set(re.findall(r"--[a-z-]+", options)) <= known, line


def test_every_command_is_in_the_readme() -> None:
    for name in main.commands:
        assert f"mergepipe {name}" in TEXT


def test_the_exit_codes_are_the_ones_of_the_classes() -> None:
    named = {
        "recipe": errors.RecipeError,
        "incomplete": errors.IncompleteCheckpointError,
        "budget": errors.BudgetError,
        "conflict": errors.CommitConflictError,
        "corruption": errors.CorruptionError,
        "disk full": errors.StorageFullError,
    }
    flat = " ".join(TEXT.split())
    for word, error in named.items():
        assert f"{error.exit_code} {word}" in flat


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (demo|test|ui)\b", TEXT):
        assert f"\n{target}:" in makefile


@pytest.mark.skipif(dg_program() is None, reason="needs dg (pip install -e .[dev])")
def test_the_commands_of_the_standing_pipeline_run(tmp_path: Path) -> None:
    for name in ("dagster.yaml", "pyproject.toml", "mergepipe_pipeline", "assets", "sensors"):
        os.symlink(ROOT / name, tmp_path / name)
    (commands,) = (b for b in blocks("sh") if "DAGSTER_HOME" in b)
    assert commands.splitlines()[-1].startswith("dg dev ")
    # It runs until it is stopped; tests/dagster_layer/test_reload.py starts it.
    script = commands.replace("dg dev ", "exit 0 ").replace("dg ", f"{dg_program()} ")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    found = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "All definitions loaded successfully" in found.stdout
    assert (tmp_path / "warehouse" / "dagster" / "dagster.yaml").is_file()
