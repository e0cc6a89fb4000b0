"""Experts that land join the recipes whose selectors take them; those that go leave them."""

from __future__ import annotations

import shutil
from contextlib import suppress

import dagster as dg
import pytest

from mergepipe_pipeline.assets.recipes import build_recipe_assets
from mergepipe_pipeline.deploy.arrivals import ask, attempted
from mergepipe_pipeline.deploy.inbox import scan_inbox
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.deploy.standing import Standing, standing, wanted
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.sensors.reload import files_token
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.deploy import Due, current, due
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.verbs.register import tag
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, records_of, shown
from tests.dagster_layer.test_experts import jobs

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def write(home: Warehouse, selector: str = "match: chat-*") -> None:
    home.recipe_path("n").write_text(
        "merge_method: task_arithmetic\nbase_model: base\nmodels:\n"
        f"- {{{selector}, parameters: {{weight: 0.5}}}}\n"
    )


def recipe_file_of(home: Warehouse) -> RecipeFile:
    (recipe_file,) = recipe_files(home)
    return recipe_file


def land(home: Warehouse, drop: Drop, **names: str) -> None:
    """Copies and indexes checkpoints of the family, each under a name."""
    for name, source in names.items():
        drop(name.replace("_", "-"), source)
        index_arrival(home, name.replace("_", "-"))


def test_of_three_that_join_one_that_leaves_and_one_that_changes_one_merge_is_made(
    home: Warehouse, drop: Drop, ticker: Ticker, instance: dg.DagsterInstance
) -> None:
    write(home)
    land(home, drop, base="base", chat_0="expert_00", chat_1="expert_00")
    assert jobs(ticker.tick()) == ["merge_n"]
    shutil.rmtree(home.inbox / "chat-0")
    land(home, drop, chat_1="expert_03", chat_2="expert_02", chat_3="expert_02")
    drop("chat-4", "expert_02")
    assert jobs(ticker.tick()) == ["chat-4", "merge_n"]
    assert recipe_file_of(home).members == ("base", "chat-1", "chat-2", "chat-3", "chat-4")
    assert [r.number for r in history(home, "n")] == [1, 2]
    (gone,) = (
        r for r in records_of(shown(instance, "n", "plan")["selected"]) if r["expert"] == "chat-0"
    )
    assert gone["selector"] == "models[0]: match chat-*"
    assert "it is gone: nothing lies at" in str(gone["taken, or why not"])


def test_the_edges_of_a_recipe_lead_to_what_its_selector_takes(home: Warehouse, drop: Drop) -> None:
    write(home, "tag: prod")
    land(home, drop, base="base", a="expert_00", b="expert_01", c="expert_02")
    assert "none of these has the tag 'prod'" in (recipe_file_of(home).problem or "")
    tag(home, "b", add=["prod"])
    tag(home, "c", add=["prod"])
    plan = next(
        d
        for d in build_recipe_assets(recipe_file_of(home))
        if isinstance(d, dg.AssetsDefinition) and dg.AssetKey(["n", "plan"]) in d.keys
    )
    mapping = plan.get_partition_mapping(dg.AssetKey("expert_index"))
    assert isinstance(mapping, dg.SpecificPartitionsPartitionMapping)
    assert list(mapping.partition_keys) == ["base", "b", "c"]


def test_what_no_selector_takes_changes_neither_definitions_nor_what_is_wanted(
    home: Warehouse, drop: Drop
) -> None:
    write(home, "match: chat-*, exclude: [chat-x*]")
    land(home, drop, base="base", chat_a="expert_00")
    before = files_token("", [recipe_file_of(home)]), wanted(home, recipe_file_of(home))
    land(home, drop, math="expert_01", chat_x1="expert_02")
    assert (files_token("", [recipe_file_of(home)]), wanted(home, recipe_file_of(home))) == before
    land(home, drop, chat_b="expert_00")
    token, state = files_token("", [recipe_file_of(home)]), wanted(home, recipe_file_of(home))
    assert token != before[0]
    assert state != before[1]
    shutil.rmtree(home.inbox / "chat-a")
    assert recipe_file_of(home).members == ("base", "chat-b")
    # Its content stays, its name does not.
    assert wanted(home, recipe_file_of(home)) not in (before[1], state)


def test_a_recipe_waits_for_what_is_about_to_join_and_for_nothing_else(
    home: Warehouse, drop: Drop
) -> None:
    write(home)
    land(home, drop, base="base", chat_a="expert_00")
    assert isinstance(due(home, recipe_file_of(home)), Due)
    for name in ("chat-b", "chat-c", "math"):
        drop(name, "expert_01")
    (home.inbox / "chat-half").mkdir()
    (home.inbox / "chat-half" / "config.json").write_text("{}")

    def waiting(names: str) -> Standing:
        said = f"it waits for the index of what is about to join: {names}"
        return standing(recipe_file_of(home), "waiting", said)

    assert due(home, recipe_file_of(home)) == waiting("chat-b, chat-c")
    for entry in (x for x in scan_inbox(home, 0.0) if x.is_ready):
        ask(home, entry.name, entry.token)
    land(home, drop, chat_b="expert_01")
    assert due(home, recipe_file_of(home)) == waiting("chat-c")
    with suppress(CheckpointError), attempted(home, "chat-c"):
        assert due(home, recipe_file_of(home)) == waiting("chat-c")
        raise CheckpointError("It cannot be read")
    assert isinstance(due(home, recipe_file_of(home)), Due)
    land(home, drop, chat_c="expert_01")
    assert recipe_file_of(home).members == ("base", "chat-a", "chat-b", "chat-c")
    assert due(home, recipe_file_of(home)) != current(recipe_file_of(home))
