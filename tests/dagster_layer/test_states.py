"""What lands damaged, half or is refused: its partition says why, and so does who waits for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.storage.asset_check_execution_record import (
    AssetCheckExecutionRecordStatus as Status,
)

from mergepipe_pipeline.assets.experts import EXPERT_INDEX, USABLE
from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.storage.permissions import this_user
from mergepipe_pipeline.text import plain_of_markdown
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.check import check
from mergepipe_pipeline.verbs.ls import ls
from mergepipe_pipeline.verbs.register import quarantine
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, known_experts
from tests.dagster_layer.test_experts import jobs, sum_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
_CHECK = dg.AssetCheckKey(EXPERT_INDEX, USABLE)


def said_of(instance: dg.DagsterInstance, name: str) -> list[tuple[bool, str]]:
    """Whether each evaluation of a partition's check passed, and what it said; oldest first."""
    records = instance.event_log_storage.get_asset_check_execution_history(_CHECK, limit=100)
    events = [r.event.dagster_event for r in reversed(records) if r.event]
    told = [e.asset_check_evaluation_data for e in events if e]
    return [(e.passed, plain_of_markdown(e.description or "")) for e in told if e.partition == name]


def shown(instance: dg.DagsterInstance) -> dict[str, bool]:
    """What the UI shows of each partition's check now: whether it passed."""
    found = instance.event_log_storage.get_asset_check_partition_info([_CHECK])
    return {
        str(f.partition_key): f.latest_execution_status is Status.SUCCEEDED
        for f in found
        # It shows no check of an earlier event of the index.
        if f.is_current
    }


def test_what_lands_damaged_or_half_has_a_failed_check_that_recipes_quote_until_it_is_whole(
    home: Warehouse, ticker: Ticker, drop: Drop, instance: dg.DagsterInstance
) -> None:
    for name in ("base", "half"):
        drop(name, "expert_01" if name == "half" else name)
    drop("damaged", "expert_00")
    (home.inbox / "damaged" / "model.safetensors").write_bytes(b"no header")
    first, *_ = sorted((home.inbox / "half").glob("*.safetensors"))
    first.rename(aside := home.root / "aside")
    home.recipe_path("r").write_text(sum_of("base", "half", "damaged"))
    assert jobs(ticker.tick()) == ["base"]
    ticker.tick()
    assert known_experts(instance, home) == ["base", "damaged", "half"]
    assert shown(instance) == {"damaged": False, "half": False}
    for name, why in (("damaged", "A safetensors header"), ("half", first.name)):
        ((passed, said),) = said_of(instance, name)  # once, however many ticks there are
        assert not passed
        assert why in said
    (told,) = (r for r in ticker.reasons() if r.startswith("r: "))
    assert "half cannot be used as it is since " in told
    assert first.name in told
    assert "damaged cannot be used as it is since " in told
    with pytest.raises(RecipeError) as refused:
        check(home, load_recipe(home.recipe_path("r"), home))
    assert first.name in str(refused.value)
    assert "A safetensors header" in str(refused.value)
    rows = {row["name"]: row["reason"] for row in ls(home).damaged}
    assert rows.keys() == {"damaged", "half"}
    assert first.name in rows["half"]
    aside.rename(first)
    assert jobs(ticker.tick()) == ["half"]
    ticker.tick()
    assert shown(instance) == {"damaged": False, "half": True}
    shutil.rmtree(home.inbox / "damaged")
    ticker.tick()
    assert known_experts(instance, home) == ["base", "half"]


def test_an_expert_in_quarantine_has_a_failed_check_that_says_who_decided_and_why(
    home: Warehouse, ticker: Ticker, drop: Drop, instance: dg.DagsterInstance
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    home.recipe_path("r").write_text(sum_of("base", "expert_00") + "trigger: manual\n")
    assert jobs(ticker.tick()) == ["base", "expert_00"]
    quarantine(home, "expert_00", reason="it swears")
    ticker.tick()
    assert shown(instance) == {"expert_00": False}
    ((_, said),) = said_of(instance, "expert_00")
    assert f" by {this_user()}: it swears; " in said
    assert any(said in reason for reason in ticker.reasons())
    # A person may have the check run by hand.
    job = build_definitions(home).resolve_implicit_global_asset_job_def()
    alone = job.get_subset(asset_selection=set(), asset_check_selection={_CHECK})
    alone.execute_in_process(instance=instance, partition_key="expert_00")
    assert said_of(instance, "expert_00") == [(False, said)] * 2
    drop("expert_00", "expert_02")  # other contents are free
    assert jobs(ticker.tick()) == ["expert_00"]
    ticker.tick()
    assert shown(instance) == {"expert_00": True}
    drop("expert_00")
    assert jobs(ticker.tick()) == ["expert_00"]
    ticker.tick()
    assert shown(instance) == {"expert_00": False}
    quarantine(home, "expert_00", release=True)
    ticker.tick()
    assert shown(instance) == {"expert_00": True}


def test_a_new_version_that_is_damaged_fails_the_check_of_the_old_one(
    home: Warehouse, ticker: Ticker, drop: Drop, instance: dg.DagsterInstance, family: Path
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    home.recipe_path("r").write_text(sum_of("base", "expert_00") + "trigger: manual\n")
    ticker.tick()
    file = home.inbox / "expert_00" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    ticker.tick()
    assert shown(instance) == {"expert_00": False}
    ((_, why),) = said_of(instance, "expert_00")
    assert any("not those that were indexed; expert_00 cannot" in r for r in ticker.reasons())
    assert any(why in reason for reason in ticker.reasons())
