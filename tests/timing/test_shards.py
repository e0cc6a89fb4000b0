"""Shards: every layer once, in the plan's order, and about as much for each worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage.profile import store_profile
from mergepipe_pipeline.timing.shards import balanced, shards_of
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.profiles import PROFILE

COSTS = st.lists(st.floats(0, 1e12), max_size=40).map(
    lambda costs: {f"layer.{i:02d}": cost for i, cost in enumerate(costs)}
)


@pytest.fixture
def plan(home: Warehouse, recipe_text: Callable[..., str]) -> MergePlan:
    """A plan of four layers over four experts."""
    return make_plan(home, parse(recipe_text(), name="r", where="r"))


@given(COSTS, st.integers(1, 50))
def test_each_layer_is_in_one_shard_and_no_shard_could_give_a_layer_away_and_gain(
    costs: dict[str, float], count: int
) -> None:
    groups = balanced(costs, count)
    assert len(groups) == count
    assert sorted(name for group in groups for name in group) == sorted(costs)
    assert all(list(group) == [n for n in costs if n in group] for group in groups)
    loads = [sum(costs[name] for name in group) for group in groups]
    for group, load in zip(groups, loads, strict=True):
        if group:
            dearest_to_give = min(costs[name] for name in group)
            assert load - dearest_to_give <= min(loads) * (1 + 1e-9)


def test_shards_weigh_bytes_until_the_machine_is_measured_and_then_seconds(
    home: Warehouse, plan: MergePlan
) -> None:
    everything = {layer.name: layer for layer in plan.layers}
    (whole,) = shards_of(home, plan, 1)
    read = sum(layer.expert_bytes_planned for layer in plan.layers)
    bases = sum(t.base.view.nbytes for x in plan.layers for t in x.tasks if t.base)
    written = sum(t.out_nbytes for x in plan.layers for t in x.tasks)
    assert (whole.layers, whole.unit) == (tuple(everything), "bytes")
    assert whole.cost == read + bases + written
    store_profile(home.profile_path, PROFILE)
    timed = shards_of(home, plan, 2, ["embed", "head"])
    assert [(s.unit, s.count) for s in timed] == [("s", 2)] * 2
    assert sorted(name for s in timed for name in s.layers) == ["embed", "head"]


def test_a_method_that_nobody_measured_is_weighed_in_bytes(
    home: Warehouse, plan: MergePlan
) -> None:
    store_profile(home.profile_path, PROFILE)
    assert {s.unit for s in shards_of(home, replace(plan, method="model_stock"), 3)} == {"bytes"}
