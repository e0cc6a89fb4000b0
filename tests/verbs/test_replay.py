"""A snapshot is made again from its own record, here or elsewhere, or what differs is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.checkpoints.writer import ShardWriter
from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import (
    CheckpointChangedError,
    CorruptionError,
    MergePipeError,
    NotFoundError,
)
from mergepipe_pipeline.execution.lookup import load_plan
from mergepipe_pipeline.snapshots.export import Shards
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.verbs.merge import export
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replay import replay
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.execution.test_stages import both
from tests.support.family import write_adapter

Text = Callable[..., str]


@pytest.mark.parametrize(
    ("method", "planning"),
    [
        ("ties", {}),
        ("dare_ties", {"budget": "30%", "strategy": "magnitude", "block_elems": 4096}),
        ("task_arithmetic", {"budget": "error=20%"}),
    ],
)
def test_a_merge_gives_the_same_bits_again_whatever_was_asked_on_the_command_line(
    home: Warehouse, recipe_text: Text, method: str, planning: dict[str, Any]
) -> None:
    made = run(home, recipe_text(method, ""), **planning)
    found = replay(home, made.snapshot.snapshot_id[:10])
    assert found.snapshot_id == made.snapshot.snapshot_id
    assert (found.layers, found.tensors) == (4, 20)
    assert not list(home.staging.iterdir())


def test_nothing_of_catalog_or_action_cache_takes_part(
    home: Warehouse, recipe_text: Text, tmp_path: Path
) -> None:
    made = run(home, recipe_text())
    for folder in (home.actions_dir, home.plans, home.catalog_dir):
        remove_tree(folder)
    replay(home, made.snapshot.snapshot_id, keep=tmp_path / "kept")
    kept = Warehouse.at(tmp_path / "kept")
    assert verify(kept, made.snapshot.snapshot_id).snapshot_id == made.snapshot.snapshot_id


def test_stages_adapters_and_registered_names_are_replayed(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "lora", 3)
    register(home, family / "base", "tall")
    register(home, family / "expert_00", "math", "tall")
    text = both(family, made="skills")
    text = text.replace(f"model: {family}/expert_00", "model: math@1")
    text = text.replace(f"model: {family}/expert_02", f"model: tall+{adapter}")
    made = run(home, text, budget="60%")
    found = replay(home, made.snapshot.snapshot_id)
    assert set(dict(found.inputs)) == {"base", "tall", "math", "expert_01", "lora"}


def test_an_output_tokenizer_is_replayed(home: Warehouse, family: Path, recipe_text: Text) -> None:
    text = recipe_text("linear", "", extra="tokenizer_source: union", base=False)
    replay(home, run(home, text).snapshot.snapshot_id)


def test_an_exported_folder_is_replayed_elsewhere_with_its_inputs_named(
    home: Warehouse, family: Path, tmp_path: Path, recipe_text: Text
) -> None:
    shutil.copytree(family, tmp_path / "there")
    text = recipe_text(experts=2).replace(str(family), str(tmp_path / "there"))
    made = run(home, text, budget="50%")
    export(home, made.snapshot.snapshot_id, tmp_path / "out")
    shutil.rmtree(tmp_path / "there")
    elsewhere = Warehouse.at(tmp_path / "elsewhere").ensure()
    with pytest.raises(CheckpointChangedError, match=r"input expert_00.*--input expert_00=PATH"):
        replay(elsewhere, str(tmp_path / "out"))
    register(elsewhere, family / "base", "base")
    inputs = [f"--input={n}={family / n}" for n in ("expert_00", "expert_01")]
    args = ["replay", str(tmp_path / "out"), *inputs, "--json", "--home", str(elsewhere.root)]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["snapshot_id"] == made.snapshot.snapshot_id


@pytest.mark.parametrize("nbytes", [None, 50_000])
def test_a_folder_in_other_shards_is_replayed_tensor_by_tensor(
    home: Warehouse, tmp_path: Path, recipe_text: Text, nbytes: int | None
) -> None:
    made = run(home, recipe_text(experts=2)).snapshot.snapshot_id
    out = tmp_path / "out"
    export(home, made, out, Shards(nbytes))
    assert replay(home, str(out)).tensors > 0
    shard = max(out.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"gave another result.*tensor "):
        replay(home, str(out))


def test_all_inputs_that_are_missing_are_named_at_once(
    home: Warehouse, family: Path, tmp_path: Path, recipe_text: Text
) -> None:
    shutil.copytree(family, tmp_path / "there")
    text = recipe_text(experts=3).replace(str(family), str(tmp_path / "there"))
    made = run(home, text).snapshot.snapshot_id
    for name in ("base", "expert_01"):
        shutil.rmtree(tmp_path / "there" / name)
    with pytest.raises(CheckpointChangedError) as error:
        replay(home, made)
    for name in ("base", "expert_01"):
        assert f"--input {name}=PATH" in str(error.value)
    assert "expert_00" not in str(error.value)


def test_a_replay_is_not_kept_inside_the_warehouse(home: Warehouse, recipe_text: Text) -> None:
    made = run(home, recipe_text(experts=1)).snapshot.snapshot_id
    with pytest.raises(MergePipeError, match="inside the warehouse"):
        replay(home, made, keep=home.snapshots / ".." / "kept")
    assert not (home.root / "kept").exists()


def test_a_fifo_in_the_place_of_a_folders_provenance_is_refused(
    home: Warehouse, tmp_path: Path, recipe_text: Text
) -> None:
    made = run(home, recipe_text(experts=1))
    export(home, made.snapshot.snapshot_id, tmp_path / "out")
    (tmp_path / "out" / "provenance.json").unlink()
    os.mkfifo(tmp_path / "out" / "provenance.json")
    program = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "replay"]
    done = subprocess.run(
        [*program, str(tmp_path / "out"), "--home", str(home.root)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 19, done.stderr
    assert "A snapshot has no provenance" in done.stderr


def test_an_input_with_another_content_is_refused_though_size_and_time_are_kept(
    home: Warehouse, family: Path, tmp_path: Path, recipe_text: Text
) -> None:
    shutil.copytree(family, tmp_path / "models")
    made = run(home, recipe_text().replace(str(family), str(tmp_path / "models")))
    file = tmp_path / "models" / "expert_02" / "model.safetensors"
    data, was = bytearray(file.read_bytes()), file.stat()
    data[-9] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    with pytest.raises(CheckpointChangedError, match=r"input expert_02.*content"):
        replay(home, made.snapshot.snapshot_id)
    replay(home, made.snapshot.snapshot_id, inputs={"expert_02": str(family / "expert_02")})
    with pytest.raises(NotFoundError, match="no input of this name"):
        replay(home, made.snapshot.snapshot_id, inputs={"expert_2": str(family)})


def test_a_wrong_layer_that_verify_takes_for_right_is_named_with_its_tensor(
    home: Warehouse, recipe_text: Text
) -> None:
    """A poisoned action: the object is whole, but not what its key determines."""
    made = run(home, recipe_text())
    layer = made.plan.layers[2]
    store = home.objects
    right = store.lookup(layer.action_key)
    assert right is not None
    data = store.path_of(right.sha256).read_bytes()
    described = [(t.name, t.out_dtype, t.shape) for t in layer.tasks]
    with ShardWriter(home.staging / "wrong", described, {"format": "pt"}) as writer:
        body = bytearray(data[-sum(t.out_nbytes for t in layer.tasks) :])
        body[-1] ^= 1
        writer.write(memoryview(body))
        sha256, nbytes = writer.finish()
        wrong = replace(right, sha256=sha256, nbytes=nbytes, tensors=writer.prefix_digests)
    store.adopt(home.staging / "wrong", wrong)
    store.record(layer.action_key, wrong)
    remove_tree(made.snapshot.path)
    again = run(home, recipe_text())
    verify(home, again.snapshot.snapshot_id)
    last = [name for name, _ in right.tensors][-1]
    with pytest.raises(CorruptionError, match=rf"layer {layer.name}, tensor {last}"):
        replay(home, again.snapshot.snapshot_id)
    done = CliRunner().invoke(
        main, ["replay", again.snapshot.snapshot_id, "--home", str(home.root)]
    )
    assert done.exit_code == 19
    assert not list(home.staging.iterdir())


def test_a_plan_remembers_how_it_was_asked_for(home: Warehouse, recipe_text: Text) -> None:
    plan = run(home, recipe_text(), budget="40%", block_elems=8192).plan
    assert load_plan(home, plan.plan_id).request == plan.request
    assert (plan.request.budget, plan.request.block_elems) == ("40%", 8192)
    assert [m.name for m in plan.request.models][:2] == ["expert_00", "expert_01"]
