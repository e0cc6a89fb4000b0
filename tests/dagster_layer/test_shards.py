"""A merge in several steps: the ids of one step, no layer twice, and no step before its checks."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.api import create_execution_plan

from mergepipe_pipeline.assets.experts import build_burst
from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.deploy.messages import ShardTask
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.deploy.shards import merged_layers, shard_of
from mergepipe_pipeline.domain.outcome import LayerOutcome
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import BusyError, MergePipeError
from mergepipe_pipeline.execution.plan_leases import lease_layers
from mergepipe_pipeline.resources import MergePipe, build_executor
from mergepipe_pipeline.settings import EXECUTOR
from mergepipe_pipeline.verbs.deploy import (
    current_snapshot,
    merge_recipe,
    merge_shard,
    plan_recipe,
    snapshot_recipe,
)
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
#: Merges all layers of recipe n's plan as one shard, and stops after the first.
WORKER = """
import sys, time
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.verbs.deploy import current_plan, merge_shard
from mergepipe_pipeline.deploy.messages import ShardTask
from mergepipe_pipeline.deploy.shards import shard_of
from mergepipe_pipeline.warehouse import Warehouse
home = Warehouse.at(sys.argv[1])
plan = current_plan(home, "n")
shard = shard_of(plan, 1, 1, [layer.name for layer in plan.layers])
for done in merge_shard(home, ShardTask("n", plan.plan_id, shard, EngineOptions())):
    print(done.name, flush=True)
    time.sleep(60)
"""


def merge_in(
    home: Warehouse, instance: dg.DagsterInstance, steps: int, **config: Any
) -> dg.ExecuteInProcessResult:
    """Merge recipe n's plan in so many steps."""
    job = build_definitions(home, shards=steps).resolve_implicit_global_asset_job_def()
    job = job.get_subset(asset_selection={dg.AssetKey(["n", "merge"])})
    said = {"ops": {"n__merge": {"config": config}}} if config else None
    return job.execute_in_process(run_config=said, instance=instance, raise_on_error=False)


def told(result: dg.ExecuteInProcessResult) -> dict[str, dict[str, Any]]:
    """What each step of the merge says of itself, by the step's name."""
    return {
        (event.step_key or "").removeprefix("n__merge."): {
            name: value.value for name, value in event.step_output_data.metadata.items()
        }
        for event in result.all_events
        if event.is_successful_output and (event.step_key or "").startswith("n__merge")
    }


def shard(home: Warehouse, plan: MergePlan, number: int, count: int) -> list[LayerOutcome]:
    """Merge a shard of recipe n's plan."""
    part = shard_of(plan, number, count, [layer.name for layer in plan.layers])
    return list(merge_shard(home, ShardTask("n", plan.plan_id, part, EngineOptions())))


def test_three_steps_give_the_ids_of_one_and_say_what_each_has_read(
    home: Warehouse, recipe_file: RecipeFile, instance: dg.DagsterInstance
) -> None:
    job = build_definitions(home, shards=3).resolve_job_def("merge_n")
    result = job.execute_in_process(instance=instance)
    by_three, plan = current_snapshot(home, "n").snapshot_id, plan_recipe(home, recipe_file)
    said = told(result)
    assert list(said) == ["shard_001", "shard_002", "shard_003", "gather"]
    names = [name for step in said.values() for name in step.get("layers", "").split(", ") if name]
    assert sorted(names) == sorted(recipe_file.layers)
    (merged,) = result.asset_materializations_for_node("n__merge.gather")
    figures = ("layers merged", "expert GiB read", "base GiB read", "GiB written")
    for figure in figures:
        parts = sum(step[figure] for name, step in said.items() if name != "gather")
        assert merged.metadata[figure].value == pytest.approx(parts, rel=1e-2)
    for path in (*home.actions_dir.glob("*/*"), *home.objects_dir.glob("*/*")):
        path.unlink()
    assert not any(
        done.reused for done in merge_recipe(home, "n", recipe_file.layers, EngineOptions())
    )
    snapshot, cost = snapshot_recipe(home, "n")
    assert (snapshot.snapshot_id, cost.expert_bytes_read) == (
        by_three,
        plan.estimates.expert_bytes_planned,
    )


def test_a_runs_config_says_how_many_steps_share_the_work_and_which_layers_it_is(
    home: Warehouse, recipe_file: RecipeFile, instance: dg.DagsterInstance
) -> None:
    plan_recipe(home, recipe_file)
    said = told(merge_in(home, instance, 3, shards=2))
    assert [said[f"shard_00{n}"]["shard"] for n in (1, 2, 3)] == ["1 of 2", "2 of 2", "3 of 2"]
    assert said["shard_003"]["layers"] == "none"
    again = told(merge_in(home, instance, 3, layers=["01", "head"]))
    names = [again[f"shard_00{n}"]["layers"] for n in (1, 2, 3)]
    assert sorted(names) == ["head", "layer.01", "none"]
    assert sum(again[f"shard_00{n}"]["layers merged"] for n in (1, 2, 3)) == 0
    refused = merge_in(home, instance, 3, layers=["1"])
    assert not refused.success


def test_no_shard_begins_before_the_plan_is_within_its_budget(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    job = build_definitions(home, shards=2).resolve_job_def("merge_n")
    steps: dict[str, Any] = {step.key: step for step in create_execution_plan(job).steps}
    for name in ("n__merge.shard_001", "n__merge.shard_002"):
        before = {key for i in steps[name].step_inputs for key in i.dependency_keys}
        assert before == {"n__plan", "n__plan_within_budget"}


def test_what_a_killed_worker_was_at_another_merges_and_nothing_twice(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    plan = plan_recipe(home, recipe_file)
    others: list[LayerOutcome] = []
    first = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(home.root)], stdout=subprocess.PIPE, text=True
    )
    other = threading.Thread(target=lambda: others.extend(shard(home, plan, 1, 1)))
    try:
        assert first.stdout is not None
        done = first.stdout.readline().strip()
        assert done == recipe_file.layers[0]
        other.start()
        other.join(0.5)
        assert other.is_alive()  # it waits for the first
        assert others == []
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=20)
    other.join(60)
    # The first may have finished more than the one that it told of.
    assert [x.name for x in others] == list(recipe_file.layers)
    assert others[0].reused
    assert not others[-1].reused
    records = merged_layers(home, "n", plan)
    assert len({r.worker for r in records}) == 2
    _, cost = snapshot_recipe(home, "n")
    lost = [x for x in others if not x.reused]
    assert cost.layers_executed in (len(lost), len(lost) + 1)
    assert not list(home.leases_dir.glob("layer-*"))


def test_two_workers_merge_shards_of_one_plan_at_once_and_nobody_plans_meanwhile(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    plan = plan_recipe(home, recipe_file)
    part = shard_of(plan, 1, 2, recipe_file.layers)
    working = merge_shard(home, ShardTask("n", plan.plan_id, part, EngineOptions()))
    begun = next(working)
    second = shard(home, plan, 2, 2)
    with pytest.raises(BusyError):
        plan_recipe(home, recipe_file)
    collect(home, older_than_s=0)
    first = [begun, *working]
    assert sorted(x.name for x in (*first, *second)) == sorted(recipe_file.layers)
    assert not any(x.reused for x in (*first, *second))
    _, cost = snapshot_recipe(home, "n")
    assert cost.expert_bytes_read == plan.estimates.expert_bytes_planned


def test_a_shard_of_a_plan_that_is_not_current_any_more_is_refused(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    plan = plan_recipe(home, recipe_file)
    plan_recipe(home, recipe_file, budget="10%")
    with pytest.raises(BusyError, match="planned anew"):
        shard(home, plan, 1, 2)


def test_a_lease_of_layers_that_a_dead_worker_left_is_nobodys(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    plan = plan_recipe(home, recipe_file)
    with lease_layers(home, plan.layers):
        left = {path.name: path.read_bytes() for path in home.leases_dir.glob("layer-*")}
        assert len(left) == len(recipe_file.layers)
    for name, data in left.items():
        (home.leases_dir / name).write_bytes(data)
    collect(home, older_than_s=0)
    assert not list(home.leases_dir.glob("layer-*"))


def test_a_burst_in_shards_indexes_each_expert_once(
    home: Warehouse, drop: Drop, instance: dg.DagsterInstance
) -> None:
    names = ["base", "expert_00", "expert_01"]
    for name in names:
        drop(name)
    job = build_burst(2)
    config = {"ops": {"index_several": {"config": {"experts": names}}}}
    resources = {"mergepipe": MergePipe(home=str(home.root))}
    result = job.execute_in_process(run_config=config, instance=instance, resources=resources)
    made = [(e.step_key, e.partition) for e in result.all_events if e.is_step_materialization]
    assert made == [
        ("index_several.shard_001", "base"),
        ("index_several.shard_001", "expert_01"),
        ("index_several.shard_002", "expert_00"),
    ]


def test_the_environment_names_the_executor_and_a_runs_config_another(
    home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fields() -> Any:
        return build_executor(home).config_schema.as_field()

    assert fields().default_value == {"in_process": {}}
    monkeypatch.setenv(EXECUTOR.variable, "multiprocess")
    assert next(iter(fields().default_value)) == "multiprocess"
    assert set(fields().config_type.fields) == {"in_process", "multiprocess"}
    monkeypatch.setitem(sys.modules, "dagster_k8s", None)
    monkeypatch.setenv(EXECUTOR.variable, "k8s")
    with pytest.raises(MergePipeError, match="not installed"):
        build_executor(home)
