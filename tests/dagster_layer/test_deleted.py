"""An expert that left the inbox is no partition, and its recipes say so until it is back."""

from __future__ import annotations

import dagster as dg
import pytest

from assets.experts import expert_index
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.test_attempts import Sensor

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def test_a_deleted_expert_leaves_the_partitions_and_its_recipe_waits_until_it_is_back(
    home: Warehouse, card: RecipeFile, ticker: Ticker, instance: dg.DagsterInstance
) -> None:
    recipes = Sensor(home, instance)
    ticker.reasons()
    assert set(instance.get_dynamic_partitions("experts")) == {"base", "expert_01"}
    assert len(recipes.tick()[0]) == 1
    folder, aside = home.inbox / "expert_01", home.root / "aside"
    folder.rename(aside)
    assert "left the inbox: expert_01" in ticker.reasons()[0]
    assert instance.get_dynamic_partitions("experts") == ["base"]
    (record,) = instance.fetch_observations(expert_index.key, 9).records
    observation = record.asset_observation
    assert observation is not None
    assert (observation.partition, observation.description) == ("expert_01", "It left the inbox.")
    for _ in range(2):
        requests, said = recipes.tick()
        assert not requests
        assert "n: expert_01 is gone: nothing lies at " in said
    aside.rename(folder)
    ticker.reasons()
    assert set(instance.get_dynamic_partitions("experts")) == {"base", "expert_01"}
    assert len(recipes.tick()[0]) == 1
