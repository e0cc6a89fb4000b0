"""A recipe reads its inputs as they were indexed, or not at all: no mixture gets a name."""

from __future__ import annotations

import os
import shutil

import dagster as dg
import pytest
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.deploy.inbox import scan_inbox
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import InputChangedError
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs import index
from mergepipe_pipeline.verbs.deploy import (
    merge_recipe,
    plan_recipe,
    release_recipe,
    snapshot_recipe,
)
from mergepipe_pipeline.verbs.index import IndexedExpert, index_arrival
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.test_experts import jobs
from tests.dagster_layer.test_release import error_of, materialise

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
WAITS = "expert_01 waits for its index"


def replace_shard(home: Warehouse, number: int) -> None:
    """Puts one shard of a new version in the place of the old one."""
    file = home.inbox / "expert_01" / f"model-0000{number}-of-00002.safetensors"
    changed = {name: value * 1.5 for name, value in load_file(file).items()}
    part = file.with_name(".part")
    save_file(changed, part, metadata={"format": "pt"})
    os.replace(part, file)


def merge_some(home: Warehouse, *layers: str) -> None:
    list(merge_recipe(home, "n", layers, EngineOptions()))


def refuse_release(home: Warehouse, recipe_file: RecipeFile, reason: str) -> None:
    snapshot_recipe(home, "n")
    with pytest.raises(InputChangedError, match=reason):
        release_recipe(home, recipe_file)
    assert home.refs.names() == []


def test_half_a_new_version_is_neither_asked_for_nor_planned_until_the_whole_one_is_indexed(
    home: Warehouse, recipe_file: RecipeFile, ticker: Ticker, instance: dg.DagsterInstance
) -> None:
    patient = Ticker(home, instance, quiet_s=3600)  # what changed lately is half copied
    replace_shard(home, 1)
    assert patient.tick() == []
    assert WAITS in patient.reasons()[1]
    assert WAITS in error_of(materialise(home, instance, "plan"))
    replace_shard(home, 2)
    assert WAITS in patient.reasons()[1]
    assert jobs(ticker.tick()) == ["expert_01", "merge_n"]


def test_a_shard_replaced_while_layers_are_merged_ends_the_merge_with_its_name(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    plan_recipe(home, recipe_file)
    merge_some(home, *recipe_file.layers[:2])
    replace_shard(home, 1)
    with pytest.raises(InputChangedError, match=WAITS):
        merge_some(home, *recipe_file.layers[2:])


@pytest.mark.parametrize("changed", ["shard", "config", "gone"])
def test_what_was_merged_before_an_input_changed_is_not_released_after(
    home: Warehouse, recipe_file: RecipeFile, changed: str
) -> None:
    plan_recipe(home, recipe_file)
    merge_some(home, *recipe_file.layers)
    folder = home.inbox / "expert_01"
    if changed == "shard":
        replace_shard(home, 2)
    elif changed == "config":
        (folder / "config.json").write_text("{}")
    else:
        shutil.rmtree(folder)
    refuse_release(home, recipe_file, "expert_01 is gone" if changed == "gone" else WAITS)


def test_a_version_indexed_since_the_plan_is_planned_before_a_release(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    plan_recipe(home, recipe_file)
    merge_some(home, *recipe_file.layers)
    for number in (1, 2):
        replace_shard(home, number)
    index_arrival(home, "expert_01")
    refuse_release(home, recipe_file, "expert_01 has a newer version")


def test_a_version_rolled_back_while_the_next_one_was_indexed_is_indexed_again(
    home: Warehouse, recipe_file: RecipeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, aside = home.inbox / "expert_01", home.root / "aside"
    real = index.index_expert

    def late(home: Warehouse, name: str) -> IndexedExpert:
        shutil.copytree(folder, aside)
        replace_shard(home, 2)
        return real(home, name)

    monkeypatch.setattr(index, "index_expert", late)
    index_arrival(home, "expert_01")
    shutil.rmtree(folder)
    aside.rename(folder)
    with pytest.raises(InputChangedError, match=WAITS):
        plan_recipe(home, recipe_file)
    assert [x.name for x in scan_inbox(home, 0.0) if x.is_ready] == ["expert_01"]


def test_other_bytes_of_the_same_size_and_time_are_indexed_before_they_are_planned(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    file = home.inbox / "expert_01" / "model-00002-of-00002.safetensors"
    old = file.stat()
    replace_shard(home, 2)
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert file.stat().st_size == old.st_size
    with pytest.raises(InputChangedError, match=WAITS):
        plan_recipe(home, recipe_file)
    assert [x.name for x in scan_inbox(home, 0.0) if x.is_ready] == ["expert_01"]
    index_arrival(home, "expert_01")
    plan_recipe(home, recipe_file)
