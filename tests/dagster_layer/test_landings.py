"""What assets of a project make lands by itself, once for each event, from one partition or all."""

import filecmp
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.assets.landings import CHECKPOINT
from mergepipe_pipeline.dagster import (
    MergePipeResource,
    build_inbox_defs,
    build_recipe_defs,
    build_search_defs,
    build_window_defs,
    door,
)
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.resources import Engine
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.verbs.land import land_for
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.test_existing_project import RECIPE, Project, all_done
from tests.search.world import SEARCH
from tests.support.family import make_family
from tests.support.laws import examples

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

LANDING = "mergepipe_both_landing_sensor"
PARTS = dg.StaticPartitionsDefinition(["math", "code", "poetry"])


def part(name: str) -> dg.AssetDep:
    """The partition of the training that makes an expert."""
    mapping = dg.SpecificPartitionsPartitionMapping([name])
    return dg.AssetDep(["training", "run"], partition_mapping=mapping)


BOTH: Mapping[str, door.Made] = {"math": part("math"), "code": part("code")}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "spreading", lambda: lambda context: True)
    at_once = cache(lambda root: (MergePipeResource(home=root, inbox_quiet_s=0), Engine()))
    monkeypatch.setattr(door, "_of_home", at_once)


@dg.asset(key=["training", "run"], partitions_def=PARTS, config_schema={"folder": str})
def run(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
    """A training of somebody's that knows nothing of us but one key."""
    path = dg.MetadataValue.path(context.op_execution_context.op_config["folder"])
    return dg.MaterializeResult(metadata={CHECKPOINT: path})


class Training(Project):
    """A project that merges two partitions of a training."""

    def __init__(
        self,
        instance: dg.DagsterInstance,
        home: Warehouse,
        experts: Mapping[str, door.Made] = BOTH,
        *more: dg.Definitions,
    ) -> None:
        recipe = build_recipe_defs({"both": RECIPE}, home=home.root, experts=experts)
        inbox = build_inbox_defs(home=home.root)
        super().__init__(instance, dg.Definitions(assets=[run]), inbox, recipe, *more)

    def train(self, name: str, folder: str | Path) -> None:
        """Materialize one partition, which says that its checkpoint lies there."""
        done = dg.materialize(
            [run],
            instance=self.instance,
            partition_key=name,
            run_config={"ops": {"training__run": {"config": {"folder": str(folder)}}}},
        )
        assert done.success

    def landed(self, sensor: str = LANDING) -> int:
        """How many runs a tick of the sensor had land something; all of them succeeded."""
        return len(all_done(self.tick(sensor)))

    def status(self, *key: str) -> StaleStatus:
        """Whether Dagster takes an asset for fresh."""
        graph, context = self.defs.resolve_asset_graph(), LoadingContextForTest(self.instance)
        resolver = CachingStaleStatusResolver(self.instance, graph, context)
        return resolver.get_status(dg.AssetKey(key))


def is_as(one: Path, other: Path) -> bool:
    """Whether two folders hold the same weights."""
    names = [path.name for path in other.glob("*.safetensors")]
    return filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def test_checkpoints_of_two_partitions_land_and_merge_and_the_third_leaves_the_plan_fresh(
    home: Warehouse, family: Path, instance: dg.DagsterInstance
) -> None:
    project = Training(instance, home)
    assert project.landed() == 0
    project.train("math", family / "expert_00")
    project.train("code", family / "expert_01")
    assert (project.landed(), project.landed()) == (2, 0)
    assert len(all_done(project.tick("mergepipe_inbox_sensor"))) == 2
    assert len(all_done(project.tick("mergepipe_both_recipe_sensor"))) == 1
    assert last_release(home, "both") is not None
    assert project.status("both", "plan") is StaleStatus.FRESH
    project.train("poetry", family / "expert_02")
    assert (project.status("both", "plan"), project.landed()) == (StaleStatus.FRESH, 0)
    project.train("math", family / "expert_02")
    assert (project.status("both", "plan"), project.landed()) == (StaleStatus.STALE, 1)
    all_done(project.tick("mergepipe_inbox_sensor"))
    assert len(all_done(project.tick("mergepipe_both_recipe_sensor"))) == 1
    assert project.status("both", "plan") is StaleStatus.FRESH


EVENTS = st.lists(
    st.sampled_from([("math", 0), ("math", 1), ("code", 0), ("poetry", 2), "tick", "restart"]),
    max_size=9,
)


@given(events=EVENTS)
@settings(max_examples=examples(6))
def test_whatever_is_trained_and_restarted_the_last_of_each_lies_there_and_none_landed_twice(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int] | str]
) -> None:
    folder = tmp_path_factory.mktemp("events")
    home = Warehouse.at(folder / "warehouse").ensure()
    family = make_family(folder / "family", 3)
    with dg.DagsterInstance.ephemeral() as instance:
        project = Training(instance, home)
        wanted, unseen, landed = dict[str, int](), set[str](), 0
        for event in [*events, "tick"]:
            if event == "restart":
                project = Training(instance, home)
            elif isinstance(event, tuple):
                project.train(event[0], family / f"expert_{event[1]:02d}")
                if event[0] != "poetry":
                    wanted[event[0]] = event[1]
                    unseen.add(event[0])
            else:
                landed = project.landed()
                assert landed == len(unseen)
                unseen.clear()
        lying = {path.name for path in home.inbox.iterdir() if not path.name.startswith(".")}
        assert lying == set(wanted)
        assert all(is_as(home.inbox / n, family / f"expert_{i:02d}") for n, i in wanted.items())
        assert project.landed() == 0


def said(project: Project, name: str) -> str:
    """What a tick of the landing sensor that asks for nothing says of an expert."""
    repository = project.defs.get_repository_def()
    with dg.build_sensor_context(
        instance=project.instance,
        repository_def=repository,
        resources=repository.get_top_level_resources(),
    ) as context:
        found = repository.get_sensor_def(LANDING)(context)
    assert isinstance(found, dg.SensorResult)
    assert found.skip_reason is not None
    lines = (found.skip_reason.skip_message or "").replace("• ", "").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}: "))
    return line


def test_what_is_gone_half_or_nowhere_is_said_and_harms_no_other_and_lands_once_it_is_mended(
    home: Warehouse, family: Path, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    project = Training(instance, home)
    folder = tmp_path / "trained"
    project.train("math", folder)
    project.train("code", family / "expert_00")
    assert project.landed() == 1
    assert "which is no folder" in said(project, "math")
    shutil.copytree(family / "expert_01", folder)
    whole = (folder / "model-00001-of-00002.safetensors").read_bytes()
    (folder / "model-00001-of-00002.safetensors").write_bytes(whole[:-1])
    assert "model-00001-of-00002.safetensors" in said(project, "math")
    project.train("math", os.path.relpath(folder))
    assert "starts from the folder of some process" in said(project, "math")
    assert {path.name for path in home.inbox.iterdir()} == {"code"}
    (folder / "model-00001-of-00002.safetensors").write_bytes(whole)
    project.train("math", folder)
    assert (project.landed(), project.landed()) == (1, 0)


def test_a_run_that_fails_is_tried_later_and_the_tick_says_why(
    home: Warehouse, family: Path, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    project = Training(instance, home)
    folder = shutil.copytree(family / "expert_00", tmp_path / "trained")
    (folder / "README.md").symlink_to("/etc/hostname")
    project.train("math", folder)
    (failed,) = project.tick(LANDING)
    assert not failed.success
    assert "README.md" in said(project, "math")
    assert list(home.inbox.iterdir()) == []
    (folder / "README.md").unlink()
    project.train("math", folder)
    assert project.landed() == 1


def test_a_partition_that_is_not_there_or_not_named_is_said(
    home: Warehouse, family: Path, instance: dg.DagsterInstance
) -> None:
    project = Training(instance, home, {"math": "training/run", "code": part("cod")})
    assert "no materialisation of training/run says" in said(project, "math")
    project.train("math", family / "expert_00")
    assert "has partitions" in said(project, "math")
    assert "training/run has no partition 'cod'" in said(project, "code")


def test_what_a_person_lands_over_it_stays_until_the_asset_is_made_again(
    home: Warehouse, family: Path, instance: dg.DagsterInstance
) -> None:
    project = Training(instance, home)
    project.train("math", family / "expert_00")
    assert project.landed() == 1
    MergePipeResource(home=str(home.root)).land(family / "expert_02", "math")
    event = dg.AssetMaterialization(["training", "run"], partition="math", description="A note.")
    instance.report_runless_asset_event(event)
    assert project.landed() == 0
    assert is_as(home.inbox / "math", family / "expert_02")
    where = {CHECKPOINT: str(family / "expert_00")}
    event = dg.AssetMaterialization(["training", "run"], partition="math", metadata=where)
    instance.report_runless_asset_event(event)
    assert (project.landed(), project.landed()) == (1, 0)


def test_of_two_processes_that_land_one_event_at_once_one_does(
    home: Warehouse, family: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(land_for, home, "math", str(family / "expert_00"), "run 1.0")
            for _ in range(4)
        ]
    assert [done.result() is not None for done in asked].count(True) == 1


@pytest.mark.parametrize("names", [["both"], ["both", "again"]])
def test_recipes_and_searches_of_one_name_over_one_training_load_together(
    home: Warehouse, names: list[str]
) -> None:
    search = SEARCH.replace("one", "math").replace("zero", "code") + "evaluations: 4\n"
    recipe = "merge_method: linear\nmodels:\n"
    recipe += "".join(f"  - {{model: {x}, parameters: {{weight: 0.5}}}}\n" for x in BOTH)
    searches = {f"{x}_s": search for x in names}
    defs = dg.Definitions.merge(
        build_recipe_defs(dict.fromkeys(names, recipe), home=home.root, experts=BOTH),
        build_search_defs(searches, home=home.root, experts=BOTH),
    )
    sensors = [sensor.name for sensor in defs.get_repository_def().sensor_defs]
    assert len([name for name in sensors if name.endswith("landing_sensor")]) == 2


def test_nothing_lands_in_the_place_of_a_training_run(home: Warehouse, tmp_path: Path) -> None:
    defs = build_window_defs(tmp_path / "sft", home=home.root, training="sft")
    names = {sensor.name for sensor in defs.get_repository_def().sensor_defs}
    assert names == {"mergepipe_window_recipe_sensor"}


def test_a_dep_on_several_partitions_makes_no_expert(home: Warehouse) -> None:
    for mapping in (
        dg.SpecificPartitionsPartitionMapping(["math", "code"]),
        dg.LastPartitionMapping(),
    ):
        dep = dg.AssetDep("run", partition_mapping=mapping)
        with pytest.raises(RecipeError, match="No single partition makes an expert"):
            build_recipe_defs({"both": RECIPE}, home=home.root, experts={"math": dep})
