"""What starts a recipe as a condition of Dagster's, and what releases start by theirs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status
from dagster._core.events import StepMaterializationData
from dagster._core.instance.utils import RUNLESS_JOB_NAME, RUNLESS_RUN_ID

from mergepipe_pipeline.dagster import (
    MergePipeProps,
    MergePipeResource,
    MergePipeTranslator,
    build_inbox_defs,
    build_recipe_defs,
    door,
)
from mergepipe_pipeline.resources import Engine
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.dagster_layer.daemon import Daemon
from tests.dagster_layer.test_existing_project import RECIPE, Project
from tests.docs.page import DOCS, blocks

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

ONE = RECIPE.replace("code", "math")


@pytest.fixture(autouse=True)
def _at_once(home: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "spreading", lambda: lambda context: True)
    at_once = cache(lambda root: (MergePipeResource(home=root, inbox_quiet_s=0), Engine()))
    monkeypatch.setattr(door, "_of_home", at_once)


class Conditions(Project):
    """A project whose recipes are started by conditions."""

    def __init__(self, home: Warehouse, instance: dg.DagsterInstance, **about: Any) -> None:
        recipes = {"both": RECIPE, "one": ONE}
        super().__init__(
            instance,
            build_inbox_defs(home=home.root),
            build_recipe_defs(recipes, home=home.root, automation="condition", **about),
        )
        self.cursor: str | None = None

    def look(self) -> Any:
        """What the sensor of the recipes gives to the daemon."""
        repository = self.defs.get_repository_def()
        with dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursor,
            repository_def=repository,
            resources=repository.get_top_level_resources(),
        ) as context:
            found = repository.get_sensor_def("mergepipe_recipe_sensor").evaluate_tick(context)
        self.cursor = found.cursor
        return found

    def index(self) -> None:
        """Let the inbox be looked at until what lies there is indexed."""
        for _ in range(2):
            self.tick("mergepipe_inbox_sensor")
            time.sleep(0.1)

    def run(self, request: dg.RunRequest) -> bool:
        """Run what is asked for, as the daemon would; whether that went well."""
        assert request.job_name == "__ASSET_JOB"
        job = self.defs.resolve_implicit_global_asset_job_def()
        return job.execute_in_process(
            instance=self.instance, asset_selection=request.asset_selection, tags=request.tags
        ).success

    def told(self, found: Any) -> Mapping[str, str]:
        """By recipe, what the evaluations say that this look records."""
        return {
            e.key.path[0]: e.condition_snapshot.description
            for e in found.automation_condition_evaluations
        }


def test_conditions_ask_for_the_runs_of_the_sensor_with_its_keys_and_tags_and_say_why(
    home: Warehouse, instance: dg.DagsterInstance, drop: Drop
) -> None:
    ours = Conditions(home, instance)
    by_sensor = build_recipe_defs({"both": RECIPE, "one": ONE}, home=home.root)
    other = Project(instance, build_inbox_defs(home=home.root), by_sensor)
    assert "default_automation_condition_sensor" not in ours.sensors

    def both_ways() -> tuple[list[str], Mapping[str, str]]:
        """The recipes of which a run is asked, and what is recorded; both forms say the same."""
        repository = other.defs.get_repository_def()
        with dg.build_sensor_context(
            instance=instance,
            repository_def=repository,
            resources=repository.get_top_level_resources(),
        ) as context:
            wanted = repository.get_sensor_def("mergepipe_recipe_sensor").evaluate_tick(context)
        found = ours.look()
        asked = [[(r.run_key, r.tags) for r in x.run_requests or ()] for x in (found, wanted)]
        assert asked[0] == asked[1]
        told = ours.told(found)
        assert all(ours.run(request) for request in found.run_requests)
        return [r.tags["mergepipe/recipe"] for r in found.run_requests], told

    asked, told = both_ways()
    assert (asked, set(told)) == ([], {"both", "one"})
    assert "math, code are not registered yet" in told["both"]
    assert both_ways() == ([], {}), "what has not changed is not recorded again"
    drop("math", "expert_00")
    ours.index()
    asked, told = both_ways()
    assert asked == ["one"]
    assert told["one"].startswith("the release is not what the inputs ask for")
    assert both_ways() == ([], {"one": "current: the release is current"})
    for source in ("expert_00", "expert_02", "expert_00"):
        drop("code", source)
        ours.index()
        assert both_ways()[0] == ["both"]
        assert both_ways()[0] == []
    drop("code", "expert_00")
    drop("unused", "expert_01")
    ours.index()
    assert both_ways() == ([], {})
    assert last_release(home, "both") is not None


class Held(MergePipeTranslator):
    """Lets nothing start but what somebody's own condition lets."""

    def get_asset_spec(self, props: MergePipeProps) -> dg.AssetSpec:
        wants = props.spec.automation_condition
        if wants is None:
            return props.spec
        held = wants & ~dg.AutomationCondition.any_deps_missing()
        return props.spec.replace_attributes(automation_condition=held)


def test_a_translator_adds_to_the_condition_and_no_other_sensor_finds_it_true(
    home: Warehouse, instance: dg.DagsterInstance, drop: Drop
) -> None:
    drop("math", "expert_00")
    project = Conditions(home, instance, translator=Held(), experts={"math": "training"})
    project.index()
    found = project.look()
    assert not found.run_requests
    assert project.told(found).keys() == {"both", "one"}
    instance.report_runless_asset_event(dg.AssetMaterialization("training"))
    instance.report_runless_asset_event(dg.AssetMaterialization(["one", "conflicts"]))
    assert dg.evaluate_automation_conditions(project.defs, instance).total_requested == 0
    (request,) = project.look().run_requests
    assert request.tags["mergepipe/recipe"] == "one"
    assert {key.path[0] for key in request.asset_selection} == {"one"}


class Taken(MergePipeTranslator):
    """Gives all assets the condition of somebody's choice."""

    def get_asset_spec(self, props: MergePipeProps) -> dg.AssetSpec:
        return props.spec.replace_attributes(automation_condition=dg.AutomationCondition.eager())


def test_a_recipe_whose_condition_a_translator_takes_away_says_so(home: Warehouse) -> None:
    made = build_recipe_defs(
        {"one": ONE}, home=home.root, automation="condition", translator=Taken()
    )
    key = dg.AssetKey(["one", "plan"])
    said = str(made.resolve_assets_def(key).specs_by_key[key].description)
    assert "takes away the condition" in said
    assert "recipe_wants, alone or with others" in said


def test_a_condition_of_dagsters_own_misses_what_lands_after_a_plan_and_before_its_next_look(
    instance: dg.DagsterInstance,
) -> None:
    experts = dg.AssetSpec("expert_index", partitions_def=dg.StaticPartitionsDefinition(["math"]))
    of_math = dg.SpecificPartitionsPartitionMapping(["math"])

    @dg.asset(
        deps=[dg.AssetDep(experts, partition_mapping=of_math)],
        automation_condition=dg.AutomationCondition.eager(),
    )
    def plan() -> None:
        """As ours, under `eager()`."""

    defs, cursor = dg.Definitions([experts, plan]), None
    landed = dg.AssetMaterialization("expert_index", partition="math")
    asked = []
    for events in ([landed], [landed], [dg.AssetMaterialization("plan"), landed], []):
        for event in events:
            instance.report_runless_asset_event(event)
        looked = dg.evaluate_automation_conditions(defs, instance, cursor=cursor)
        cursor = looked.cursor
        asked.append(looked.total_requested)
    assert asked[1:] == [1, 0, 0]


(WEEKLY,) = (b.text for b in blocks(DOCS / "existing-project.md") if "class Weekly" in b.text)
#: A project that serves what is released, and wants a release a week.
THEIRS = f"""
import os
from datetime import timedelta
import dagster as dg
from mergepipe_pipeline.dagster import *

{WEEKLY}
@dg.asset(deps=[["one", "release"]], automation_condition=dg.AutomationCondition.eager())
def serving():
    pass

theirs = dg.AutomationConditionSensorDefinition(
    "theirs",
    target="serving",
    use_user_code_server=True,
    minimum_interval_seconds=2,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
recipe = {ONE!r} + "schedule: '0 3 * * *'\\ntrigger: change\\n"
home = os.environ["MERGEPIPE_HOME"]
defs = dg.Definitions.merge(
    dg.Definitions([serving], sensors=[theirs], executor=dg.in_process_executor),
    build_inbox_defs(home=home),
    build_recipe_defs({{"one": recipe}}, home=home, automation="condition", translator=Weekly()),
)
"""
RELEASE = dg.AssetKey(["one", "release"])


class Served(Daemon):
    """A daemon over that project, with an old release that nobody merged here."""

    def __init__(self, home: Warehouse) -> None:
        super().__init__(home, environment={"FRESHNESS_DAEMON_INTERVAL_SECONDS": "2"})
        project = home.root / "project.py"
        project.write_text(THEIRS)
        self.workspace = home.root / "workspace.yaml"
        self.workspace.write_text(f"load_from: [{{python_file: {project}}}]\n")
        made = StepMaterializationData(dg.AssetMaterialization(RELEASE))
        kind = dg.DagsterEventType.ASSET_MATERIALIZATION.value
        event = dg.DagsterEvent(kind, RUNLESS_JOB_NAME, event_specific_data=made)
        with self.instance as instance:
            instance.report_dagster_event(event, RUNLESS_RUN_ID, timestamp=time.time() - 200 * 3600)

    def freshness(self) -> str:
        """What the freshness daemon says of the release."""
        with self.instance as instance:
            found = instance.get_freshness_state_records([RELEASE])
        return found[RELEASE].freshness_state.value if found else ""

    def last_label(self) -> str:
        """What the last evaluation says of the plan."""
        with self.instance as instance:
            assert instance.schedule_storage is not None
            found = instance.schedule_storage.get_auto_materialize_asset_evaluations(
                dg.AssetKey(["one", "plan"]), 1
            )
        return str(found[0].get_evaluation_with_run_ids().evaluation.condition_snapshot.label)

    def served(self) -> int:
        """How many runs of the asset downstream there are, once it was looked at twice more."""
        before = len(self.skips("theirs", None))
        self.wait_for("two more looks", lambda: len(self.skips("theirs", None)) > before + 2)
        return sum(dg.AssetKey("serving") in (r.asset_selection or ()) for r in self.runs())

    def wait_for_merges(self, number: int) -> None:
        """Until so many runs of the recipe have succeeded."""
        self.wait_for(f"merge {number}", lambda: len(self.merges(Status.SUCCESS)) == number)

    def merges(self, *statuses: Status) -> set[str]:
        """The runs of the recipe."""
        found = self.runs("__ASSET_JOB", *statuses)
        return {run.run_id for run in found if "mergepipe/recipe" in run.tags}


def test_under_a_daemon_a_change_is_merged_and_served_once_and_an_unchanged_night_serves_nothing(
    home: Warehouse, drop: Drop
) -> None:
    daemon = Served(home)
    try:
        daemon.start()
        daemon.wait_for("a release is overdue", lambda: daemon.freshness() == "FAIL")
        before = daemon.served()
        for number, source in enumerate(("expert_00", "expert_02"), 1):
            drop("math", source)
            daemon.wait_for_merges(number)
            assert daemon.served() == before + number
            a_night_finds_nothing(home, daemon)
            assert daemon.served() == before + number
        daemon.wait_for("the release is fresh", lambda: daemon.freshness() == "PASS")
        assert len(daemon.merges()) == 2
        with daemon.instance as instance:
            storage = instance.schedule_storage
            assert storage is not None
            found = storage.get_auto_materialize_asset_evaluations(dg.AssetKey(["one", "plan"]), 50)
        told = [record.get_evaluation_with_run_ids() for record in found]
        assert {run_id for one in told for run_id in one.run_ids} == daemon.merges()
        # It waits for some seconds after each time that the daemon loads the definitions anew.
        daemon.wait_for(
            "the release is current",
            lambda: daemon.last_label() == "current: the release is current",
        )
    finally:
        daemon.kill()


def a_night_finds_nothing(home: Warehouse, daemon: Daemon) -> None:
    recipe = ONE + "schedule: '0 3 * * *'\ntrigger: change\n"
    defs = build_recipe_defs({"one": recipe}, home=home.root)
    schedule = defs.get_repository_def().get_schedule_def("mergepipe_nightly_merge_one")
    with (
        daemon.instance as instance,
        dg.build_schedule_context(instance=instance, resources=defs.resources) as context,
    ):
        assert "current" in str(schedule.evaluate_tick(context).skip_message)
