"""Layers in Dagster: one asset per recipe however many they are, one partition for each."""

from __future__ import annotations

import dagster as dg
import pytest

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.deploy import current_plan
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.dagster_layer.test_experts import jobs, sum_of
from tests.facts.test_input_segments import flip
from tests.support.family import Size, tensors_of, write_model

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
MERGE, LAYERS = dg.AssetKey(["a", "merge"]), dg.AssetKey(["a", "layers"])
NAMES = ["embed", "00", "01", "head"]


def reported(instance: dg.DagsterInstance) -> list[dg.AssetMaterialization]:
    """What was reported of layers, in order."""
    records = instance.fetch_materializations(LAYERS, limit=100, ascending=True).records
    return [r.asset_materialization for r in records if r.asset_materialization]


def merge(home: Warehouse, instance: dg.DagsterInstance, *only: str) -> dg.ExecuteInProcessResult:
    """Materialise `a/merge` alone, of some layers if any are named."""
    defs = build_definitions(home)
    job = defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection={MERGE})
    config = {"ops": {"a__merge": {"config": {"layers": list(only)}}}} if only else None
    return job.execute_in_process(run_config=config, instance=instance, raise_on_error=False)


@pytest.fixture
def released(home: Warehouse, ticker: Ticker, drop: Drop) -> Warehouse:
    """Recipe a of one expert, released."""
    for name in ("base", "expert_00"):
        drop(name)
    home.recipe_path("a").write_text(sum_of("base", "expert_00"))
    assert jobs(ticker.tick())[-1] == "merge_a"
    return home


def test_a_recipe_of_eighty_layers_is_seven_assets(home: Warehouse) -> None:
    size: Size = {"layers": 80, "hidden": 4, "vocab": 8}
    for i, name in enumerate(("base", "one")):
        register(home, write_model(home.inbox / name, tensors_of(i, None, **size), **size), name)
    home.recipe_path("a").write_text(sum_of("base", "one"))
    graph = build_definitions(home).resolve_asset_graph()
    names = {key.path[-1] for key in graph.get_all_asset_keys() if key.path[0] == "a"}
    assert names == {"conflicts", "plan", "merge", "layers", "snapshot", "release", "report"}
    layers = graph.get(LAYERS).partitions_def
    assert layers is not None
    assert layers.get_partition_keys() == [
        "embed",
        *(f"{i:02d}" for i in range(80)),
        "head",
    ]


def test_each_layer_is_reported_with_its_key_and_by_its_run(
    released: Warehouse, instance: dg.DagsterInstance
) -> None:
    made = reported(instance)
    keys = [layer.layer_key for layer in current_plan(released, "a").layers]
    assert [m.partition for m in made] == NAMES
    assert [(m.tags or {})["dagster/data_version"] for m in made] == keys
    (run,) = instance.get_runs(dg.RunsFilter(job_name="merge_a"))
    logs = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    assert [e.dagster_event.partition for e in logs if e.dagster_event][2:6] == NAMES


def test_layers_that_are_known_are_reported_as_reused(
    released: Warehouse, instance: dg.DagsterInstance
) -> None:
    assert merge(released, instance).success
    again = reported(instance)[len(NAMES) :]
    assert [(m.partition, m.metadata["reused"].value) for m in again] == [(n, True) for n in NAMES]


def test_some_layers_are_merged_if_a_person_names_them(
    released: Warehouse, instance: dg.DagsterInstance
) -> None:
    assert merge(released, instance, "01", "head").success
    assert [m.partition for m in reported(instance)[len(NAMES) :]] == ["01", "head"]
    refused = merge(released, instance, "1")
    (failed,) = [e for e in refused.all_events if e.is_step_failure]
    assert "expected embed, 00, 01, head, found 1" in str(failed.step_failure_data.error).lower()


def test_layers_that_ended_before_one_failed_are_reported(
    home: Warehouse, ticker: Ticker, drop: Drop, instance: dg.DagsterInstance
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    assert len(ticker.tick()) == 2
    home.recipe_path("a").write_text(sum_of("base", "expert_00"))
    defs = build_definitions(home)
    job = defs.resolve_implicit_global_asset_job_def()
    before = {dg.AssetKey(["a", name]) for name in ("conflicts", "plan")}
    assert job.get_subset(asset_selection=before).execute_in_process(instance=instance).success
    flip(home.inbox / "expert_00", "model.layers.1.mlp.up_proj.weight", 0.5)
    assert not merge(home, instance).success
    assert [m.partition for m in reported(instance)] in (["embed"], ["embed", "00"])
