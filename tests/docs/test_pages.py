"""What the README and `docs/` say is run: recipes, commands, Python; what they list exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.daemon import dg_program
from tests.docs.generate import PARTS, page
from tests.docs.page import DOCS, ROOT, blocks, is_run, run_page

README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md")))
#: Blocks of `sh` that are no lines of `mergepipe`: what they begin with, and where they are run.
ELSEWHERE = {
    "python3 -m venv": "by hand on a fresh clone; `make test` installs the same",
    "python docs/examples/make_models.py": "conftest.example_models",
    "dg list components": "tests/dagster_layer/test_components.py",
    "make ": "test_the_make_targets_exist",
    'cp -a "$MERGEPIPE_HOME"': "tests/warehouse/test_backup.py",
    "export MERGEPIPE_HOME": "here, and the example's by test_examples",
    'eval "$(_MERGEPIPE_COMPLETE': "test_the_line_for_bash_completes_commands",
}


@pytest.mark.parametrize("path", [README, DOCS / "recipes.md"], ids=lambda p: p.name)
def test_a_pages_recipe_merges_with_the_commands_shown(path: Path, models: Path) -> None:
    run_page(path)
    assert (models / "merged" / "config.json").exists()


def test_the_gated_recipe_of_its_page_is_measured_and_released(models: Path) -> None:
    run_page(DOCS / "gates.md")
    refs = Warehouse.at(models / "warehouse").refs
    assert refs.current("stable").snapshot_id == refs.current("gated").snapshot_id


def test_the_readme_is_short_and_its_first_recipe_has_six_lines() -> None:
    assert len(README.read_text().split()) <= 900
    (recipe,) = (b for b in blocks(README) if b.language == "yaml")
    assert len(recipe.text.splitlines()) == 6


def test_the_pages_are_short_enough_to_be_read() -> None:
    pages = (README, *DOCS.glob("*.md"))
    assert sum(len(path.read_text().split()) for path in pages) <= 16_000


def test_every_block_of_commands_is_run_here_or_elsewhere() -> None:
    for path in PAGES:
        for block in blocks(path):
            if block.language == "sh" and not is_run(block):
                assert block.text.startswith(tuple(ELSEWHERE)), f"{path.name}: {block.text}"


def test_links_lead_to_files_and_headings() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if "://" in target:
                continue
            file, _, heading = target.partition("#")
            linked = path.parent / file if file else path
            assert linked.exists(), f"{path.name} links {target}"
            if heading:
                found = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
                assert heading in {h.lower().replace(" ", "-") for h in found}, target


def test_names_of_the_code_stand_where_a_page_links_them() -> None:
    text = (DOCS / "integrations.md").read_text()
    for name, path in re.findall(r"\[`(\w+)`\]\((\S+\.py)\)", text):
        nodes = list(ast.walk(ast.parse((DOCS / path).read_text())))
        # Functions and classes, parameters, fields and what is imported to be called.
        held = {getattr(n, key, None) for n in nodes for key in ("name", "arg", "id")}
        assert name in held, f"{path} has no {name}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached = {README}
    for _ in range(3):
        for path in list(reached):
            links = re.findall(r"\]\(([^)\s#]+\.md)[)#]", path.read_text())
            reached |= {(path.parent / link).resolve() for link in links if "://" not in link}
    assert set(PAGES) <= reached


def test_the_python_example_runs(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (b.text for b in blocks(DOCS / "python.md") if b.language == "python")
    exec(compile(example, "python.md", "exec"), {})
    printed = capsys.readouterr().out.split()
    assert re.fullmatch("[0-9a-f]{64}", printed[0])
    assert printed[3].startswith(printed[2])


def test_the_error_that_is_shown_is_what_a_user_sees(tmp_path: Path) -> None:
    (shown,) = (b.text for b in blocks(DOCS / "errors.md") if b.language == "text")
    words = ["--home", str(tmp_path / "w"), "check", "nothing.yml"]
    assert CliRunner().invoke(main, words).stderr == shown


@pytest.mark.parametrize("name", PARTS)
def test_what_is_made_from_the_code_is_current(name: str) -> None:
    path, _ = PARTS[name]
    assert page(name) == path.read_text(), "run `python -m tests.docs.generate`"


def test_paths_that_contributors_are_sent_to_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("| to add |") : text.index("## Tests")]
    for path in re.findall(r"`([\w./]+/[\w.]*|\w+\.py)`", table):
        assert (ROOT / path).exists() or (ROOT / "mergepipe_pipeline" / path).exists(), path


def test_every_command_and_option_that_a_page_names_exists() -> None:
    for path in PAGES:
        text = path.read_text().replace("\\|", "/")
        for name, options in re.findall(r"mergepipe ([a-z]+(?:-[a-z]+)*)\b([^`\n]*)`", text):
            known = {o for p in main.commands[name].params for o in p.opts}
            assert set(re.findall(r"--[a-z-]+", options)) <= known, f"{path.name}: {name}{options}"


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for path in PAGES:
        for target in re.findall(r"`make ([a-z-]+)|^make (\w+)", path.read_text(), re.MULTILINE):
            assert f"\n{''.join(target)}:" in makefile, f"{path.name}: {target}"


def test_the_line_for_bash_completes_commands(tmp_path: Path) -> None:
    (line,) = (b.text for b in blocks(DOCS / "cli.md") if "bash_source" in b.text)
    program = tmp_path / "mergepipe"
    start = "from mergepipe_pipeline.cli.main import program; program()"
    program.write_text(f"#!{sys.executable}\n{start}\n")
    program.chmod(0o755)
    press_tab = (
        "COMP_WORDS=(mergepipe verify --sco) COMP_CWORD=2\n_mergepipe_completion mergepipe\n"
        'echo "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    found = subprocess.run(
        ["bash", "-ec", line + press_tab],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.strip() == "--scope"


@pytest.mark.skipif(dg_program() is None, reason="needs dg (pip install -e .[dev])")
def test_the_commands_of_the_standing_pipeline_run(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "mergepipe_pipeline", "assets", "sensors"):
        os.symlink(ROOT / name, tmp_path / name)
    (commands,) = (b.text for b in blocks(DOCS / "dagster.md") if "DAGSTER_HOME" in b.text)
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
