"""`pack` and `unpack` as a person and as a machine would use them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.verbs.register import register
from tests.packs.models import warehouse_of
from tests.support.family import write_adapter


def run(tmp: Path, *words: str, code: int = 0) -> str:
    """What a command prints."""
    result = CliRunner().invoke(main, ["--home", str(tmp / "home"), *words])
    assert result.exit_code == code, result.output
    return result.output


def data(tmp: Path, *words: str) -> Any:
    """What a command prints as JSON."""
    result = CliRunner().invoke(main, [*words, "--home", str(tmp / "home"), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_pack_tells_what_it_made_and_that_it_was_made_before(tmp_path: Path) -> None:
    warehouse_of(tmp_path, experts=2)
    both = data(tmp_path, "pack")["packs"]
    assert [p["name"] for p in both] == ["e0", "e1"]
    tiers = ["R0", "R1", "R2", "L0", "L1", "L2", "L3", "X20", "X"]
    assert [list(p["tier_nbytes"]) for p in both] == [tiers] * 2
    text = run(tmp_path, "pack", "e0")
    assert "packed before" in text
    assert "pays back after" in text


def test_analyze_packs_when_asked(tmp_path: Path) -> None:
    warehouse_of(tmp_path)
    found = data(tmp_path, "analyze", "--pack")
    assert [a["name"] for a in found["analyses"]] == ["base", "e0"]
    assert [(p["name"], p["fresh"]) for p in found["packs"]] == [("e0", True)]


def test_adapters_have_no_pack_and_stop_nobody_elses(tmp_path: Path, family: Path) -> None:
    warehouse = warehouse_of(tmp_path)
    register(warehouse, family / "base", "small")
    register(warehouse, write_adapter(tmp_path / "lora", 3), "lora", "small")
    assert data(tmp_path, "analyze", "lora", "--pack")["packs"] == []
    assert [p["name"] for p in data(tmp_path, "pack")["packs"]] == ["e0"]
    assert "have no pack" in run(tmp_path, "pack", "lora", code=15)


def test_an_expert_goes_to_cold_storage_and_comes_back(tmp_path: Path) -> None:
    warehouse_of(tmp_path)
    cold = str(tmp_path / "cold")
    run(tmp_path, "pack", "e0", "--replace", code=2)
    assert "1 weight file moved to" in run(tmp_path, "pack", "e0", "--replace", "--cold", cold)
    recipe = tmp_path / "r.yml"
    recipe.write_text("merge_method: linear\nmodels: [{model: e0, parameters: {weight: 1}}]\n")
    assert "expert bytes" in run(tmp_path, "check", str(recipe))
    refused = run(tmp_path, "plan", str(recipe), "--no-packs", code=12)
    assert "mergepipe unpack e0" in refused
    assert f"the originals stay in {cold}/e0" in run(tmp_path, "unpack", "e0")
    assert "moved to" in run(tmp_path, "pack", "e0", "--replace", "--cold", cold)
    shutil.rmtree(cold)
    told = run(tmp_path, "unpack", "e0")
    assert "1 weight file" in told
    assert "originals stay" not in told
    assert (tmp_path / "e0" / "e0.safetensors").exists()
