"""Expected times: at the rate of the newest merge here, and none before it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.throughput import expected_s, nbytes_of_plan, nbytes_of_recipe
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run

Text = Callable[..., str]


def test_the_newest_merge_that_ran_layers_says_how_fast_it_is(
    home: Warehouse, recipe_text: Text
) -> None:
    assert expected_s(home, 1) is None
    first = run(home, recipe_text())
    second = run(home, recipe_text(), budget="30%")
    cost = second.realised
    assert cost.layers_executed
    newest = os.path.join(second.snapshot.path, "provenance.json")
    os.utime(newest, (4e9, 4e9))
    assert expected_s(home, 3 * cost.nbytes) == pytest.approx(3 * cost.layers_s)
    with open(newest, "ab") as file:  # a damaged one tells nothing
        file.write(b"x")
    cost = first.realised
    assert expected_s(home, cost.nbytes) == pytest.approx(cost.layers_s)


def test_what_is_expected_counts_the_bytes_of_a_recipe_and_of_a_plan(
    home: Warehouse, recipe_text: Text
) -> None:
    raw = parse(recipe_text(extra="budget: 30%"), name="r", where="r")
    before = resolve(home, raw)
    plan = make_plan(home, raw)
    cost = resolve(home, raw).cost
    assert cost.budget_bytes is not None
    known = cost.base_bytes + cost.budget_bytes + cost.output_bytes
    assert nbytes_of_recipe(resolve(home, raw)) == known + cost.analysis_bytes
    assert nbytes_of_recipe(before) > known
    assert nbytes_of_plan(plan) <= known
