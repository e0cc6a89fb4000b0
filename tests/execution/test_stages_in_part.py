"""What is told of the error of a merge whose earlier stages are merged under its budget, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run


def _two_stages(family: Path) -> str:
    """The second stage adds next to nothing to what the first one makes."""
    return f"""\
name: first
merge_method: task_arithmetic
base_model: {family}/base
models: [{{model: {family}/expert_00, parameters: {{weight: 1.0}}}}]
---
merge_method: task_arithmetic
base_model: first
models: [{{model: {family}/expert_01, parameters: {{weight: 0.001}}}}]
"""


def _tensors(folder: str) -> dict[str, torch.Tensor]:
    return {k: v for f in Path(folder).glob("*.safetensors") for k, v in load_file(f).items()}


def test_no_bound_is_promised_that_earlier_stages_would_break(
    home: Warehouse, tmp_path: Path, family: Path
) -> None:
    part, whole = run(home, _two_stages(family), budget="25%"), run(home, _two_stages(family))
    theirs = _tensors(whole.snapshot.path)
    off = sum(
        float((value.float() - theirs[name].float()).norm() ** 2)
        for name, value in _tensors(part.snapshot.path).items()
    )
    assert off > 0
    e = part.plan.estimates
    assert e.error_bound is e.predicted_error is e.predicted_margin is None
    assert e.bound_note == "stage first was merged under the budget, too"
    (warning,) = (w for w in part.plan.warnings if "stage first" in w)
    assert warning.endswith("an error is of the last stage alone")


@pytest.mark.parametrize("budget", [None, "100%"])
def test_stages_that_are_merged_whole_have_the_error_of_the_last(
    home: Warehouse, family: Path, budget: str | None
) -> None:
    e = run(home, _two_stages(family), budget=budget).plan.estimates
    assert e.error_bound == e.predicted_error == 0


def test_people_and_machines_are_told_why_there_is_no_error(tmp_path: Path, family: Path) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(_two_stages(family))
    words = ["merge", str(recipe), "--budget", "25%", "--home", str(tmp_path / "w")]
    shown = CliRunner().invoke(main, words).stdout
    assert "not predicted: stage first was merged under the budget, too" in shown
    told = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert told["error_bound"] is told["predicted_error"] is None
    assert told["error_bound_note"] == "stage first was merged under the budget, too"
