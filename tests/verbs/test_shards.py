"""Shards: every layer once, in the plan's order, and about as much for each worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.deploy.shards import balanced, shard_of
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.warehouse import Warehouse

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


def test_shards_weigh_the_bytes_that_are_read_and_written(plan: MergePlan) -> None:
    names = [layer.name for layer in plan.layers]
    whole = shard_of(plan, 1, 1, names)
    read = sum(layer.expert_bytes_planned + layer.base_nbytes for layer in plan.layers)
    written = sum(t.out_nbytes for x in plan.layers for t in x.tasks)
    assert (whole.layers, whole.nbytes) == (tuple(names), read + written)
    parts = [shard_of(plan, n, 2, ["embed", "head"]) for n in (1, 2)]
    assert sorted(name for s in parts for name in s.layers) == ["embed", "head"]
    assert shard_of(plan, 3, 2, names).layers == ()
