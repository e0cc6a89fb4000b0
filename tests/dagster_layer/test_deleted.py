"""An expert that left the inbox is no partition, and its recipes say so until it is back."""

from __future__ import annotations

import dagster as dg
import pytest

from assets.experts import expert_index
from mergepipe_pipeline.pipeline.cards import RecipeCard
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.test_experts import jobs

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def test_a_deleted_expert_leaves_the_partitions_and_its_recipe_waits_until_it_is_back(
    home: Warehouse, card: RecipeCard, ticker: Ticker, instance: dg.DagsterInstance
) -> None:
    assert jobs(ticker.tick()) == ["merge_n"]
    assert set(instance.get_dynamic_partitions("experts")) == {"base", "expert_01"}
    folder, aside = home.inbox / "expert_01", home.root / "aside"
    folder.rename(aside)
    said = ticker.reasons()
    assert "left the inbox: expert_01" in said[0]
    assert "n: expert_01 is gone" in said[1]
    assert instance.get_dynamic_partitions("experts") == ["base"]
    seen = instance.fetch_observations(expert_index.key, 9).records
    (observation,) = [r.asset_observation for r in seen]
    assert (observation.partition, observation.description) == ("expert_01", "It left the inbox.")
    home.recipe_path("n").write_text(card.recipe.text.replace("0.5", "0.25"))
    assert ticker.tick() == []
    assert "n: expert_01 is gone" in ticker.reasons()[1]
    aside.rename(folder)
    assert jobs(ticker.tick()) == ["merge_n"]
    assert set(instance.get_dynamic_partitions("experts")) == {"base", "expert_01"}
