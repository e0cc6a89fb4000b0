"""Through Dagster: what lands is indexed, what depends on it is merged, and nothing else runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.assets.experts import experts_of
from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
NAMES = ("base", "expert_00", "expert_01", "expert_02")


def write_recipe(home: Warehouse, name: str, experts: list[str], extra: str = "") -> None:
    models = "".join(f"  - model: {e}\n    parameters: {{weight: 1.0}}\n" for e in experts)
    home.recipe_path(name).write_text(
        f"merge_method: ties\nbase_model: base\nmodels:\n{models}"
        f"parameters: {{density: 0.4}}\nbudget: 50%\n{extra}"
    )


@pytest.fixture(scope="module")
def first_release(tmp_path_factory: pytest.TempPathFactory, family: Path) -> Warehouse:
    """Recipes a (experts 0, 1) and b (experts 0, 2), both released; read-only."""
    home = Warehouse.at(tmp_path_factory.mktemp("first") / "warehouse").ensure()
    for name in NAMES:
        shutil.copytree(family / name, home.inbox / name)
    write_recipe(home, "a", ["expert_00", "expert_01"])
    write_recipe(home, "b", ["expert_00", "expert_02"])
    with dg.DagsterInstance.ephemeral() as instance:
        ticker = Ticker(home, instance)
        assert [r["success"] for r in ticker.tick()] == [True] * 6
        assert ticker.tick() == []
    return home


@pytest.fixture
def released(
    home: Warehouse, first_release: Warehouse, instance: dg.DagsterInstance, ticker: Ticker
) -> Ticker:
    """A copy of the warehouse `first_release` under an instance that knows its experts."""
    shutil.copytree(first_release.root, home.root, dirs_exist_ok=True)
    instance.add_dynamic_partitions(experts_of(home).name or "", list(NAMES))
    return ticker


def test_landing_checkpoints_are_indexed_merged_and_released(
    home: Warehouse, released: Ticker
) -> None:
    for ref in ("a", "b"):
        assert [r.number for r in history(home, ref)] == [1]
        verify(home, ref)


def test_an_expert_that_nobody_uses_is_indexed_and_nothing_else_runs(
    released: Ticker, drop: Drop
) -> None:
    drop("expert_03")
    runs = released.tick() + released.tick()
    assert [(r["job"], r["partition"]) for r in runs] == [("index_experts", "expert_03")]


def test_a_new_version_with_two_changed_layers_reruns_only_its_recipe_and_those_layers(
    home: Warehouse, released: Ticker
) -> None:
    for file in (home.inbox / "expert_01").glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if ".layers.1." in name:
                tensors[name] = tensors[name] + torch.full_like(tensors[name], 0.01)
        save_file(tensors, file, metadata={"format": "pt"})
    runs = released.tick()
    assert [(r["job"], r["partition"]) for r in runs] == [
        ("index_experts", "expert_01"),
        ("merge_a", None),
    ]
    reused = runs[1]["layers_reused"]
    assert reused["01"] is False
    assert [r.number for r in history(home, "a")] == [1, 2]
    assert [r.number for r in history(home, "b")] == [1]


def test_touching_files_without_changing_a_byte_merges_nothing(
    home: Warehouse, released: Ticker
) -> None:
    (home.inbox / "expert_00" / "model.safetensors").touch()
    runs = released.tick() + released.tick()
    assert [(r["job"], r["partition"]) for r in runs] == [("index_experts", "expert_00")]


def test_a_change_and_its_undoing_both_reach_the_release(
    home: Warehouse, released: Ticker, drop: Drop
) -> None:
    first = history(home, "b")[-1].snapshot_id
    drop("expert_02", "expert_03")
    released.tick()
    assert history(home, "b")[-1].snapshot_id != first
    drop("expert_02")
    released.tick()
    assert history(home, "b")[-1].snapshot_id == first


def test_a_half_copied_expert_is_left_alone_until_it_is_whole(
    home: Warehouse, family: Path, ticker: Ticker
) -> None:
    folder = home.inbox / "expert_01"
    folder.mkdir()
    source = family / "expert_01"
    shutil.copy(source / "model.safetensors.index.json", folder)
    shutil.copy(source / "model-00001-of-00002.safetensors", folder)
    assert ticker.tick() == []
    second = (source / "model-00002-of-00002.safetensors").read_bytes()
    (folder / "model-00002-of-00002.safetensors").write_bytes(second[: len(second) // 2])
    assert ticker.tick() == []
    assert "truncated" in ticker.reasons()[0]
    (folder / "model-00002-of-00002.safetensors").write_bytes(second)
    assert [r["partition"] for r in ticker.tick()] == ["expert_01"]


def test_young_files_wait_for_the_quiet_period(home: Warehouse, drop: Drop) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        patient = Ticker(home, instance, quiet_s=3600)
        drop("expert_00")
        assert patient.tick() == []
        assert "quiet" in patient.reasons()[0]


def test_a_recipe_that_cannot_be_read_does_not_stop_the_others(
    home: Warehouse, released: Ticker
) -> None:
    home.recipe_path("broken").write_text("merge_method: tiess\n")
    defs = build_definitions(home)
    names = {s.name for s in defs.get_repository_def().sensor_defs}
    assert "recipe_sensor" in names
    assert released.tick() == []


def test_a_blocking_check_stops_a_release_with_nan_weights(
    home: Warehouse, ticker: Ticker, drop: Drop
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    file = home.inbox / "expert_00" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    home.recipe_path("n").write_text(
        "merge_method: task_arithmetic\nbase_model: base\nmodels:\n"
        "  - model: expert_00\n    parameters: {weight: 1}\n"
    )
    runs = ticker.tick()
    assert [r["success"] for r in runs] == [True, True, False]
    assert not (home.refs_dir / "n").exists()


def test_the_lineage_of_a_recipe_names_exactly_its_checkpoints(
    home: Warehouse, released: Ticker
) -> None:
    graph = build_definitions(home).resolve_asset_graph()
    keys: set[Any] = {k.to_user_string() for k in graph.get_all_asset_keys()}
    assert {
        "expert_index",
        "a/conflicts",
        "a/plan",
        "a/merge",
        "a/layers",
        "a/snapshot",
        "a/release",
        "a/report",
    } <= keys
    mapping = graph.get(dg.AssetKey(["a", "plan"])).partition_mappings[dg.AssetKey("expert_index")]
    assert isinstance(mapping, dg.SpecificPartitionsPartitionMapping)
    assert list(mapping.partition_keys) == ["base", "expert_00", "expert_01"]


def test_only_recipes_that_ask_have_a_schedule_at_their_own_time(
    home: Warehouse, released: Ticker
) -> None:
    extra = 'trigger: change\nschedule: "15 2 * * *"\ntimezone: Europe/Berlin\n'
    write_recipe(home, "a", ["expert_00", "expert_01"], extra)
    assert released.tick() == []
    schedules = build_definitions(home).get_repository_def().schedule_defs
    found = {s.name: (s.cron_schedule, s.execution_timezone) for s in schedules}
    del found["space_daily"]
    assert found == {"nightly_merge_a": ("15 2 * * *", "Europe/Berlin")}


def test_a_comment_in_a_recipe_and_its_layout_merge_nothing(
    home: Warehouse, released: Ticker
) -> None:
    path = home.recipe_path("a")
    path.write_text("# for Ann\n" + path.read_text().replace("{density: 0.4}", "\n  density: 0.4"))
    assert released.tick() == []


def test_nightly_recipes_wait_for_the_night_and_manual_ones_for_a_person(
    home: Warehouse, ticker: Ticker, drop: Drop, tmp_path: Path
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    write_recipe(home, "m", ["expert_00"], "trigger: manual\n")
    write_recipe(home, "n", ["expert_00"], "trigger: nightly\n")
    write_recipe(home, "s", ["expert_00"], "schedule: '0 3 * * *'\n")
    assert [r["partition"] for r in ticker.tick()] == ["base", "expert_00"]
    said = ticker.reasons()[1]
    assert "m: it is to be merged, which its trigger leaves to a person" in said
    for name in ("n", "s"):
        assert f"{name}: it is to be merged, which its trigger leaves to its schedule" in said
    repository = build_definitions(home).get_repository_def()
    with (
        dg.DagsterInstance.local_temp(str(tmp_path)) as kept,
        dg.build_schedule_context(
            instance=kept, resources={"mergepipe": MergePipe(home=str(home.root))}
        ) as context,
    ):
        for name in ("n", "s"):
            tick = repository.get_schedule_def(f"nightly_merge_{name}").evaluate_tick(context)
            (asked,) = tick.run_requests or ()
            assert asked.tags["mergepipe/attempt"] == "1"


def test_a_recipe_that_names_a_schedule_and_a_trigger_is_merged_by_day_and_by_night(
    home: Warehouse, ticker: Ticker, drop: Drop
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    write_recipe(home, "b", ["expert_00"], "trigger: change\nschedule: '0 3 * * *'\n")
    assert ticker.tick()[-1]["job"] == "merge_b"
    schedules = build_definitions(home).get_repository_def().schedule_defs
    assert "nightly_merge_b" in {s.name for s in schedules}


def test_a_tick_tells_of_the_first_that_wait_and_counts_the_rest(
    home: Warehouse, ticker: Ticker
) -> None:
    for i in range(30):
        (home.inbox / f"empty_{i:02d}").mkdir()
    said = ticker.reasons()[0]
    assert said.startswith("30 experts, 0 to index; waiting: empty_00: ")
    assert said.count("; waiting: empty_") == 20
    assert said.endswith("; waiting: 10 more")
