"""Every verb of the command line, as a person and as a machine would use it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.warehouse import Warehouse

KEYS = {
    "snapshot_id",
    "plan_id",
    "path",
    "budget_bytes",
    "expert_bytes_total",
    "expert_bytes_planned",
    "expert_bytes_read",
    "base_bytes_read",
    "bytes_written",
    "layers_executed",
    "layers_reused",
    "error_bound",
    "wall_s",
}


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., Any]:
    """Runs a command with --json in one warehouse and gives the parsed answer."""

    def run(*words: object) -> Any:
        args = [*(str(w) for w in words), "--home", str(tmp_path / "w"), "--json"]
        result = CliRunner().invoke(main, args)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


@pytest.fixture
def recipe(tmp_path: Path, recipe_text: Callable[..., str]) -> Path:
    path = tmp_path / "mine.yml"
    path.write_text(recipe_text())
    return path


def test_merge_prints_every_promised_figure(cli: Callable[..., Any], recipe: Path) -> None:
    assert cli("merge", recipe).keys() >= KEYS


def test_check_says_when_the_standing_pipeline_merges_a_recipe(
    cli: Callable[..., Any], recipe: Path
) -> None:
    assert cli("check", recipe)["when"] == "merged whenever an expert or the recipe changes"
    recipe.write_text(recipe.read_text() + "schedule: '0 3 * * *'\ntimezone: Europe/Berlin\n")
    assert cli("check", recipe)["when"].startswith("merged by schedule '0 3 * * *' (Europe/Berlin)")


def test_the_way_from_check_to_rollback(cli: Callable[..., Any], recipe: Path) -> None:
    cost = cli("check", recipe, "--budget", "50%")
    assert cost["budget_bytes"] == cost["expert_bytes_total"] // 2
    planned = cli("plan", recipe, "--budget", "50%")
    assert planned["expert_bytes_planned"] <= planned["budget_bytes"]
    part = cli("merge", recipe, "--budget", "50%")
    assert part["plan_id"] == planned["plan_id"]
    full = cli("merge", recipe)
    assert cli("publish", part["snapshot_id"], "--ref", "live")["number"] == 1
    assert cli("publish", full["snapshot_id"][:8], "--ref", "live")["number"] == 2
    assert cli("rollback", "live")["snapshot_id"] == part["snapshot_id"]
    assert [r["number"] for r in cli("history", "live")] == [1, 2, 3]
    assert cli("verify", "live")["ok"] is True
    shares = cli("explain", part["plan_id"], "--by", "layer")["shares"]
    assert sum(s["nbytes_read"] for s in shares) == part["expert_bytes_planned"]
    listing = cli("ls")
    assert len(listing["snapshots"]) == 2
    assert len(listing["checkpoints"]) == 5


def test_verify_names_the_file_and_tensor_that_is_wrong(
    cli: Callable[..., Any], recipe: Path, tmp_path: Path
) -> None:
    done = cli("merge", recipe)
    shard = Path(done["path"]) / "model-00002-of-00004.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    result = CliRunner().invoke(
        main, ["verify", done["snapshot_id"], "--home", str(tmp_path / "w")]
    )
    assert result.exit_code == 19
    assert shard.name in result.stderr
    assert "tensor model.layers.0." in result.stderr


def test_a_folder_that_was_merged_is_verified_where_no_warehouse_is(
    cli: Callable[..., Any], recipe: Path, tmp_path: Path
) -> None:
    out, nowhere = tmp_path / "out", tmp_path / "nowhere"
    cli("merge", recipe, "--out", out)
    words = ["verify", str(out), "--home", str(nowhere)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("ok: ")
    config = out / "config.json"
    config.chmod(0o644)
    config.write_text("{}")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 19
    assert "config.json" in done.output
    assert not nowhere.exists()


def test_register_and_analyze_are_remembered(cli: Callable[..., Any], family: Path) -> None:
    cli("register", family / "base")
    assert cli("register", family / "expert_00", "--base", "base", "--name", "math")["version"] == 1
    assert cli("register", family / "expert_00", "--base", "base", "--name", "math")["version"] == 1
    assert [a["fresh"] for a in cli("analyze")] == [True, True]
    assert [a["fresh"] for a in cli("analyze")] == [False, False]
    assert cli("sql", "select count(*) as n from tensor_stats")[0]["n"] == 20


def test_an_analyst_takes_all_views_home_as_a_duckdb_file(
    cli: Callable[..., Any], recipe: Path, tmp_path: Path
) -> None:
    done, file = cli("merge", recipe), tmp_path / "all.duckdb"
    assert cli("sql", "--export", file) == {"path": str(file)}
    with duckdb.connect(str(file), read_only=True) as connection:
        found = connection.execute("select snapshot_id from snapshots").fetchall()
        assert found == [(done["snapshot_id"],)]
        assert connection.execute("select count(*) from tensor_stats").fetchall() == [(80,)]
    words = ["sql", "select 1", "--export", str(file), "--home", str(tmp_path / "w")]
    assert "takes no query" in CliRunner().invoke(main, words).stderr


def test_the_exported_folder_loads_in_transformers_and_answers(
    cli: Callable[..., Any], recipe: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    out = tmp_path / "out"
    cli("merge", recipe, "--out", out)
    names = {p.name for p in out.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "README.md",
        "model.safetensors.index.json",
        "manifest.json",
        "mergepipe_recipe.yml",
    }
    assert (out / "mergepipe_recipe.yml").read_text() == recipe.read_text()
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = AutoTokenizer.from_pretrained(out)("w5 w6 w7", return_tensors="pt")
    logits = model(input_ids=tokens["input_ids"]).logits
    assert logits.shape == (1, 3, 512)
    assert bool(torch.isfinite(logits).all())


def test_gc_removes_only_what_no_snapshot_needs(cli: Callable[..., Any], recipe: Path) -> None:
    done = cli("merge", recipe)
    cli("gc", "--older-than", "0")
    assert cli("verify", done["snapshot_id"])["ok"] is True
    assert cli("merge", recipe)["layers_executed"] == 0


@pytest.mark.parametrize(
    "module",
    [
        "mergepipe_pipeline.cli.main",
        "mergepipe_pipeline.definitions",
        "mergepipe_pipeline.api",
        "mergepipe_pipeline.operators",
    ],
)
def test_loading_never_imports_torch(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    env = {"MERGEPIPE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_about_results_starts_without_numpy(tmp_path: Path) -> None:
    code = """
import sys
from mergepipe_pipeline.cli.main import main
try:
    main(sys.argv[1:], standalone_mode=False)
except SystemExit:
    pass
sys.exit("numpy" in sys.modules)
"""
    Warehouse.at(tmp_path).ensure()
    args = ["history", "none", "--home", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert "none" in done.stderr  # it ran, and found no such ref
    assert done.returncode == 0, done.stderr


def test_every_command_has_help_and_json() -> None:
    for name, command in main.commands.items():
        assert command.help, name
        assert {"as_json", "home_dir"} <= {p.name for p in command.params}, name


def test_a_query_in_a_process_of_its_own_says_nothing_but_its_answer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "--home", str(tmp_path / "w")]
    query = ["sql", "SELECT count(*) AS n FROM digests"]
    Warehouse.at(tmp_path / "w").ensure()
    found = subprocess.run([*command, *query], capture_output=True, text=True, check=True)
    assert (found.stdout.split(), found.stderr) == (["n", "-", "0"], "")
