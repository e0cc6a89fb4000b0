"""What the verbs without a recipe leave: a folder or a snapshot that anybody can check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.verbs.tools import extract_lora
from mergepipe_pipeline.verbs.verify import verify, verify_all
from mergepipe_pipeline.warehouse import Warehouse


def test_a_folder_that_out_wrote_is_verified_wherever_it_lies(
    family: Path, home: Warehouse, tmp_path: Path, recipe_text: Callable[..., str]
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text())
    merged = merge(home, recipe, out=tmp_path / "merged")
    tuned, base = str(family / "expert_00"), str(family / "base")
    made = extract_lora(home, tuned, base, tmp_path / "adapter", rank=2)
    assert verify(home, str(tmp_path / "merged")).snapshot_id == merged.outcome.snapshot.snapshot_id
    (tmp_path / "adapter").rename(tmp_path / "moved")
    assert verify(home, str(tmp_path / "moved")).snapshot_id == made.snapshot_id
    for file, named in (
        ("moved/adapter_model.safetensors", "tensor base_model"),
        ("moved/adapter_config.json", "adapter_config"),
        ("merged/mergepipe_recipe.yml", "mergepipe_recipe"),
    ):
        path = tmp_path / file
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptionError, match=named):
            verify(home, str(path.parent))
        data[-1] ^= 1
        path.write_bytes(data)


def test_a_snapshot_of_a_tool_is_published_listed_and_explained_with_its_inputs(
    family: Path, home: Warehouse
) -> None:
    tuned, base = str(family / "expert_00"), str(family / "base")
    made = extract_lora(home, tuned, base, rank=2)
    publish(home, made.snapshot_id, "adapter")
    assert verify_all(home).findings == ()

    def told(*words: str) -> Any:
        done = CliRunner().invoke(main, ["--home", str(home.root), "--json", *words])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    made_by = told("explain", "adapter")["made_by"]
    assert made_by["parameters"]["rank"] == 2
    assert made_by["told"]["error"] == made.details["error"]
    (row,) = told("ls")["snapshots"]
    assert (row["method"], row["inputs"]) == ("extract-lora", ["base", "expert_00"])
    query = "select role, name from snapshot_inputs order by role"
    assert [tuple(r.values()) for r in told("sql", query)] == [
        ("base", "base"),
        ("expert", "expert_00"),
    ]


class _Crash(Exception):
    pass


def test_a_crash_at_any_step_leaves_nothing_in_the_results_place(
    family: Path, home: Warehouse, tmp_path: Path
) -> None:
    tuned, base, out = str(family / "expert_00"), str(family / "base"), tmp_path / "out"
    extract_lora(home, tuned, base, rank=2)  # so that the inputs are digested
    steps = 0
    while not out.exists():
        left = steps

        def crash(step: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise _Crash(step)

        atomic.crash_hook = crash
        try:
            extract_lora(home, tuned, base, out, rank=2)
        except _Crash:
            atomic.crash_hook = None
            assert not out.exists() or verify(home, str(out))
        steps += 1
    atomic.crash_hook = None
    assert steps > 4
    verify(home, str(out))
