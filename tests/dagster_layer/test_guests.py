"""On an instance that others use, too, we touch what is ours and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.assets.experts import EXPERT_INDEX, experts_of
from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.deploy.instance import identity_of
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resources import WAREHOUSE_TAG
from mergepipe_pipeline.sensors.ticks import SENSORS
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, known_experts
from tests.dagster_layer.guests import origins, ours_of
from tests.dagster_layer.test_experts import jobs, sum_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@dg.op
def nothing() -> None:
    """What all runs here do."""


@dg.job
def some() -> None:
    nothing()


def test_a_run_is_ours_by_our_warehouse_and_location_and_an_unmarked_one_by_what_it_loads(
    home: Warehouse, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    other = Warehouse.at(tmp_path / "other").ensure()
    ours, mine = ours_of(home, instance, "mergepipe"), {WAREHOUSE_TAG: identity_of(home)}
    theirs = {WAREHOUSE_TAG: identity_of(other)}

    def is_ours(tags: dict[str, str], *origin: str) -> bool:
        made: dict[str, Any] = origins("some", *origin) if origin else {}
        return ours.has(instance.create_run_for_job(some, tags=tags, **made))

    assert is_ours(mine)
    assert is_ours(mine, "mergepipe")
    assert is_ours(mine, "mergepipe", "a_module_with_ours_and_theirs")
    assert is_ours({}, "mergepipe")
    assert not is_ours(mine, "a_copy_of_the_warehouse")
    assert not is_ours(theirs, "mergepipe")
    assert not is_ours({}, "mergepipe", "a_module_with_ours_and_theirs")
    assert not is_ours({}, "team")
    assert not is_ours({"mergepipe/recipe": "n"}, "team", "own_location")
    assert not is_ours({})


def test_a_warehouse_keeps_its_identity_where_it_is_moved_and_has_none_before_it_is_made(
    home: Warehouse, tmp_path: Path
) -> None:
    before = Warehouse.at(tmp_path / "new")
    assert identity_of(before) == identity_of(before)
    assert not before.root.exists()
    assert identity_of(before.ensure()) != identity_of(home)
    known = identity_of(before)
    before.root.rename(tmp_path / "moved")
    assert identity_of(Warehouse.at(tmp_path / "moved")) == known
    assert identity_of(before.ensure()) != known


def test_the_ticks_of_all_sensors_of_ours_and_of_no_others_are_known_by_name(
    home: Warehouse, family: Path
) -> None:
    gate = "evaluate: {command: [x], metrics: [y]}\ngate: {on_failure: bisect, y: {at_least: 1}}\n"
    home.recipe_path("n").write_text(sum_of("base", "expert_00") + gate)
    (home.searches / "s.yml").write_text("- no search\n")
    sensors = build_definitions(home).get_repository_def().sensor_defs
    assert {sensor.name for sensor in sensors} | {"bisect_sensor", "landing_sensor"} == SENSORS


def test_an_instance_of_before_moves_over_by_itself_and_leaves_a_set_named_like_ours_was(
    home: Warehouse, instance: dg.DagsterInstance, ticker: Ticker, drop: Drop
) -> None:
    drop("base")
    before = dg.DynamicPartitionsDefinition(name="experts")

    @dg.asset(key=EXPERT_INDEX, partitions_def=before)
    def of_before() -> None:
        pass

    instance.add_dynamic_partitions("experts", ["base", "team-run-17"])
    dg.materialize([of_before], instance=instance, partition_key="base")
    ticker.reasons()
    assert known_experts(instance, home) == ["base"]
    assert set(instance.get_dynamic_partitions("experts")) == {"base", "team-run-17"}
    assert instance.get_materialized_partitions(EXPERT_INDEX) == {"base"}


def test_two_warehouses_and_a_stranger_share_an_instance(
    home: Warehouse, tmp_path: Path, instance: dg.DagsterInstance, ticker: Ticker, drop: Drop
) -> None:
    instance.add_dynamic_partitions("experts", ["team-run-17"])
    other = Warehouse.at(tmp_path / "other").ensure()
    second = Ticker(other, instance)
    drop("base")
    shutil.copytree(home.inbox / "base", other.inbox / "base")
    shutil.copytree(home.inbox / "base", other.inbox / "more")
    for of_whom, names in ((ticker, ["base"]), (second, ["base", "more"])):
        assert jobs(of_whom.tick()) == names
    shutil.rmtree(home.inbox / "base")
    assert "left the inbox: base" in ticker.reasons()[0]
    second.reasons()
    assert known_experts(instance, home) == []
    assert known_experts(instance, other) == ["base", "more"]
    assert instance.get_dynamic_partitions("experts") == ["team-run-17"]
    told = len(instance.fetch_materializations(dg.AssetKey("pipeline_status"), 100).records)
    for of_whom in (ticker, second, ticker, second):  # each shows its own table, and once
        of_whom.reasons()
    again = instance.fetch_materializations(dg.AssetKey("pipeline_status"), 100).records
    assert len(again) == told


def test_a_disk_that_is_gone_is_told_by_definitions_that_were_loaded_without_it(
    home: Warehouse, instance: dg.DagsterInstance, ticker: Ticker, drop: Drop
) -> None:
    drop("base")
    assert jobs(ticker.tick()) == ["base"]
    known = experts_of(home).name
    home.root.rename(home.root.with_name("aside"))
    home.ensure()
    assert experts_of(home).name != known
    with pytest.raises(MergePipeError, match="Expected a catalog with 1 experts"):
        Ticker(home, instance).tick()


def test_a_choice_of_assets_is_marked_as_ours_when_it_begins(
    home: Warehouse, instance: dg.DagsterInstance
) -> None:
    job = build_definitions(home).resolve_implicit_global_asset_job_def()
    keys = [dg.AssetKey("free_space")]
    done = job.execute_in_process(instance=instance, asset_selection=keys)
    run = instance.get_run_by_id(done.run_id)
    assert run is not None
    assert run.tags[WAREHOUSE_TAG] == identity_of(home)
    assert ours_of(home, instance).runs([Status.SUCCESS]) == [run]
