"""Rough treatment: full disks, few descriptors, NaN, half-written files, absurd options."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.cli.ending import from_os_error
from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.warehouse import Warehouse

TENSOR = "model.layers.1.mlp.up_proj.weight"


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(w) for w in words])


@pytest.fixture
def with_value(tmp_path: Path, family: Path) -> Callable[..., Path]:
    """A recipe whose one expert holds `value` at two places of one tensor."""

    def make(value: float, extra: str = "") -> Path:
        odd = tmp_path / "odd"
        odd.mkdir()
        for file in (family / "expert_00").iterdir():
            (odd / file.name).write_bytes(file.read_bytes())
        weights = load_file(odd / "model.safetensors")
        weights[TENSOR].view(-1)[[3, 70]] = torch.tensor(value, dtype=weights[TENSOR].dtype)
        save_file(weights, odd / "model.safetensors", {"format": "pt"})
        recipe = tmp_path / "r.yml"
        recipe.write_text(
            f"merge_method: task_arithmetic\nbase_model: {family / 'base'}\n"
            f"models:\n  - model: {odd}\n    parameters: {{weight: 1}}\n{extra}"
        )
        return recipe

    return make


@pytest.mark.parametrize(
    ("value", "dtype", "most"),
    [
        (float("nan"), "bfloat16", "3.38953e+38"),
        (70_000.0, "float16", "65504"),
        (500.0, "float8_e4m3fn", "448"),
        (-70_000.0, "float8_e5m2", "57344"),
    ],
)
def test_a_result_with_nan_or_infinity_is_warned_of_with_its_tensors(
    tmp_path: Path, with_value: Callable[..., Path], value: float, dtype: str, most: str
) -> None:
    recipe = with_value(value, f"out_dtype: {dtype}\n")
    for _ in range(2):  # merged, then reused
        result = call("merge", recipe, "--home", tmp_path / "w", "--json")
        assert result.exit_code == 0
        assert json.loads(result.stdout)["non_finite"] == {TENSOR: 2}
        assert "warning: the result holds NaN" in result.stderr
        assert f": 2 in {TENSOR}; " in result.stderr
        if math.isfinite(value):
            assert "no model was found to hold such values" in result.stderr
            assert f"too large for {dtype}, which ends at ±{most} (see out_dtype)" in result.stderr
        else:
            assert "such values are in odd" in result.stderr


def test_a_finite_result_is_not_warned_of(tmp_path: Path, with_value: Callable[..., Path]) -> None:
    result = call("merge", with_value(1.0), "--home", tmp_path / "w", "--json")
    assert json.loads(result.stdout)["non_finite"] == {}
    assert "infinity" not in result.stderr


@pytest.mark.parametrize("budget", ["", "budget: 40%\n"])
def test_of_an_expert_with_nan_the_error_is_said_to_be_unknown(
    tmp_path: Path, with_value: Callable[..., Path], budget: str
) -> None:
    recipe = with_value(float("nan"), budget)
    for command in ("plan", "curve"):
        shown = call(command, recipe, "--home", tmp_path / "w")
        assert shown.exit_code == 0
        assert "unknown: an expert holds NaN or infinity" in shown.stdout
        assert "nan" not in shown.stdout


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e400", "-1", "-inf"])
def test_gc_takes_only_a_number_of_seconds(tmp_path: Path, seconds: str) -> None:
    result = call("gc", "--older-than", seconds, "--home", tmp_path / "w")
    assert result.exit_code == 2
    assert "--older-than" in result.stderr


def test_gc_removes_what_a_killed_process_left_half_written(tmp_path: Path) -> None:
    home = tmp_path / "w"
    Warehouse.at(home).ensure()
    left = [home / f / "ab" / ".x.json.q1.tmp" for f in ("catalog", "actions", "refs", "objects")]
    for file in left:
        file.parent.mkdir()
        file.write_bytes(b"half")
    kept = home / "refs" / "ab" / "00000001.json"
    kept.write_bytes(b"{}")
    assert json.loads(call("gc", "--home", home, "--json").stdout)["files"] == 0
    assert "--older-than 0 takes it, too" in call("gc", "--home", home).stdout
    assert json.loads(call("gc", "--older-than", 0, "--home", home, "--json").stdout)["files"] == 4
    assert kept.exists()
    assert not any(file.exists() for file in left)


@pytest.mark.parametrize("verb", ["curve", "conflicts"])
def test_a_picture_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, recipe_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    recipe, picture = tmp_path / "r.yml", tmp_path / "t.png"
    recipe.write_text(recipe_text(experts=2))
    command = (verb, recipe, "--picture", picture, "--home", tmp_path / "w")
    assert call(*command).exit_code == 0
    before = picture.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result = call(*command)
    assert result.exit_code == 20
    assert f"error: The disk is full\n  where     {picture}\n" in result.stderr
    assert picture.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.yml", "t.png", "w"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_behind_stdout_is_an_error_and_no_traceback(
    tmp_path: Path, options: list[str]
) -> None:
    command = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "ls", *options]
    Warehouse.at(tmp_path / "w").ensure()
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*command, "--home", str(tmp_path / "w")], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 20
    assert done.stderr.startswith(b"error: The disk is full\n  where     ")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["ls", "--nothing"], "No such option '--nothing'."),
        (["nothing"], "No such command 'nothing'."),
        (["gc", "--older-than", "soon"], "'soon' is not a valid float"),
        ([], "Missing command."),
    ],
)
def test_wrong_usage_is_json_for_machines_too(words: list[str], what: str) -> None:
    command = [sys.executable, "-m", "mergepipe_pipeline.cli.main", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    told = json.loads(done.stdout)
    assert (told["exit_code"], done.returncode) == (2, 2)
    assert what in told["error"]["what"]
    assert what in done.stderr


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (errno.ENOENT, "mergepipe gc"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EACCES, "permissions"),
        (errno.EROFS, "--home"),
    ],
)
def test_what_the_system_refuses_comes_with_what_to_do(number: int, step: str) -> None:
    error = from_os_error(OSError(number, os.strerror(number), "/models/x"))
    assert f"Where: /models/x. Found {os.strerror(number)}. Next: " in str(error)
    assert step in str(error)
