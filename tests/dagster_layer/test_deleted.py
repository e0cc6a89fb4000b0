"""An expert that left the inbox is no partition, and its recipes say so until it is back.

One that `pack --replace` moved away is there all the same.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline.assets.experts import EXPERT_INDEX
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold, unpack
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import known_experts
from tests.dagster_layer.test_attempts import Sensor

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def test_a_deleted_expert_leaves_the_partitions_and_its_recipe_waits_until_it_is_back(
    home: Warehouse, recipe_file: RecipeFile, ticker: Ticker, instance: dg.DagsterInstance
) -> None:
    recipes = Sensor(home, instance)
    ticker.reasons()
    assert set(known_experts(instance, home)) == {"base", "expert_01"}
    assert len(recipes.tick()[0]) == 1
    folder, aside = home.inbox / "expert_01", home.root / "aside"
    folder.rename(aside)
    assert "left the inbox: expert_01" in ticker.reasons()[0]
    assert known_experts(instance, home) == ["base"]
    (record,) = instance.fetch_observations(EXPERT_INDEX, 9).records
    observation = record.asset_observation
    assert observation is not None
    assert (observation.partition, observation.description) == ("expert_01", "It left the inbox.")
    for _ in range(2):
        requests, said = recipes.tick()
        assert not requests
        assert "n: expert_01 is gone: nothing lies at " in said
    aside.rename(folder)
    ticker.reasons()
    assert set(known_experts(instance, home)) == {"base", "expert_01"}
    assert len(recipes.tick()[0]) == 1


def test_an_expert_in_cold_storage_stays_a_partition_and_its_recipe_is_released(
    home: Warehouse,
    recipe_file: RecipeFile,
    ticker: Ticker,
    instance: dg.DagsterInstance,
    family: Path,
    tmp_path: Path,
) -> None:
    recipes = Sensor(home, instance)
    ticker.reasons()
    (made,) = pack(home, ["expert_01"], base="base")
    shutil.rmtree(move_to_cold(home, made, tmp_path / "cold").cold)
    assert "left the inbox" not in ticker.reasons()[0]
    assert set(known_experts(instance, home)) == {"base", "expert_01"}
    assert [run["success"] for run in ticker.tick()] == [True]
    release = last_release(home, recipe_file.name)
    other = Warehouse.at(tmp_path / "other").ensure()
    for name in ("base", "expert_01"):
        register(other, family / name, name)
    expected = merge(other, home.recipe_path(recipe_file.name)).outcome.snapshot
    assert release is not None
    assert release.snapshot_id == expected.snapshot_id
    assert recipes.tick()[0] == []
    unpack(home, "expert_01")
    assert ticker.tick() == []
