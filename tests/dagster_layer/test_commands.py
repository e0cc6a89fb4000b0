"""Dagster's own commands load the definitions from any directory, and say what stops them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.daemon import REPOSITORY, dg_program
from tests.dagster_layer.test_experts import sum_of

needs_dg = pytest.mark.skipif(dg_program() is None, reason="needs dg (pip install -e .[dev])")


def run_away(
    home: Warehouse, *command: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a directory that is not the repository's."""
    return subprocess.run(
        command,
        cwd=home.root,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONWARNINGS": "ignore",
            "MERGEPIPE_HOME": str(home.root),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


@needs_dg
def test_dg_lists_the_assets_of_a_recipe_from_another_directory(
    home: Warehouse, family: Path
) -> None:
    for name in ("base", "expert_00"):
        register(home, family / name, name)
    home.recipe_path("r").write_text(sum_of("base", "expert_00"))
    listed = run_away(
        home, dg_program() or "", "list", "defs", "--json", "--target-path", str(REPOSITORY)
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
    keys = {asset["asset_key"] for asset in json.loads(listed.stdout)["assets"]}
    assert {"expert_index", "r/plan", "r/layers", "r/release"} <= keys


def test_a_wrong_setting_stops_definitions_from_loading_with_a_sentence(home: Warehouse) -> None:
    validate = [sys.executable, "-m", "dagster", "definitions", "validate"]
    workspace = str(REPOSITORY / "workspace.yaml")
    found = run_away(home, *validate, "-w", workspace, MERGEPIPE_MEMORY_MIB="lots")
    assert found.returncode == 1
    assert (
        "A setting has a wrong value. Where: MERGEPIPE_MEMORY_MIB. Expected a whole number from 1 "
        "up, found 'lots'." in found.stdout + found.stderr
    )
