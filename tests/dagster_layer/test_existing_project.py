"""A gated merge in a project that has an executor, resources, sensors and trainings of its own."""

import shutil
import time
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.dagster import (
    MergePipeProps,
    MergePipeResource,
    MergePipeTranslator,
    build_housekeeping,
    build_inbox_defs,
    build_recipe_defs,
    build_search_defs,
    build_window_defs,
    door,
)
from mergepipe_pipeline.deploy.instance import identity_of
from mergepipe_pipeline.resources import WAREHOUSE_TAG, Engine
from mergepipe_pipeline.sensors import failures
from mergepipe_pipeline.verbs.deploy import current_plan, last_release
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.search import front, search_of
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.test_failure_sensor import webhook
from tests.search.world import EVALUATOR, SEARCH, World

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

RECIPE = """merge_method: linear
models:
  - {model: math, parameters: {weight: 0.5}}
  - {model: code, parameters: {weight: 0.5}}
"""
GATE = """evaluate: {command: [python, eval.py]}
gate: {size: {min: 1}}
"""
EXPERTS: dict[str, door.Asset] = {
    "math": "training/math",
    "code": dg.AssetKey(["training", "code"]),
}


@pytest.fixture(autouse=True)
def _at_once(home: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "spreading", lambda: lambda context: True)
    at_once = cache(lambda root: (MergePipeResource(home=root, inbox_quiet_s=0), Engine()))
    monkeypatch.setattr(door, "_of_home", at_once)


@dg.run_failure_sensor
def failure_sensor(context: dg.RunFailureSensorContext) -> None:
    """One of theirs, with a name that ours might have."""


def training(key: list[str], source: Path, resource: str = "mergepipe") -> dg.AssetsDefinition:
    """An asset of somebody's that trains an expert and lands it."""

    @dg.asset(key=key, required_resource_keys={resource})
    def train(context: dg.AssetExecutionContext) -> None:
        getattr(context.resources, resource).land(source, key[-1])

    return train


def theirs(family: Path, resource: str = "mergepipe", *prefix: str) -> dg.Definitions:
    """A project before it merges anything."""
    made = {"math": "expert_00", "code": "expert_01"}
    return dg.Definitions(
        assets=[
            training([*prefix, "training", name], family / source, resource)
            for name, source in made.items()
        ]
    )


SETTLED = dg.Definitions(
    resources={"engine": "their engine"}, sensors=[failure_sensor], executor=dg.in_process_executor
)


class Project:
    """Definitions as a code location serves them, on an instance; sensors keep their cursors."""

    def __init__(self, instance: dg.DagsterInstance, *parts: dg.Definitions) -> None:
        self.defs, self.instance = dg.Definitions.merge(SETTLED, *parts), instance
        dg.Definitions.validate_loadable(self.defs)
        self._cursors: dict[str, str | None] = {}

    @property
    def sensors(self) -> set[str]:
        """The names of all sensors."""
        return {sensor.name for sensor in self.defs.get_repository_def().sensor_defs}

    def tick(self, sensor: str) -> list[dg.ExecuteInProcessResult]:
        """Evaluate a sensor with the resources of the project, and run what it asks for."""
        repository = self.defs.get_repository_def()
        with dg.build_sensor_context(
            instance=self.instance,
            cursor=self._cursors.get(sensor),
            repository_def=repository,
            resources=repository.get_top_level_resources(),
        ) as context:
            found: Any = repository.get_sensor_def(sensor)(context)
        if isinstance(found, dg.SkipReason):
            return []
        self._cursors[sensor] = found.cursor
        for added in found.dynamic_partitions_requests or ():
            names = list(added.partition_keys)
            self.instance.add_dynamic_partitions(added.partitions_def_name, names)
        return [self._run(request) for request in found.run_requests or ()]

    def _run(self, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
        assert request.job_name
        return self.defs.resolve_job_def(request.job_name).execute_in_process(
            instance=self.instance,
            partition_key=request.partition_key,
            run_config=request.run_config,
            asset_selection=request.asset_selection,
            tags=dict(request.tags),
            raise_on_error=False,
        )

    def make(self, *keys: str) -> dg.ExecuteInProcessResult:
        """Materialize a choice of assets, as a person does."""
        return self.defs.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=self.instance,
            asset_selection=[dg.AssetKey.from_user_string(key) for key in keys],
        )

    def deps(self, key: str) -> set[str]:
        """What an asset follows in the lineage."""
        node = self.defs.resolve_asset_graph().get(dg.AssetKey.from_user_string(key))
        return {parent.to_user_string() for parent in node.parent_keys}


def all_done(results: list[dg.ExecuteInProcessResult]) -> list[str]:
    """The jobs of runs that all succeeded."""
    assert all(result.success for result in results)
    return [result.job_def.name for result in results]


def test_a_project_trains_indexes_merges_and_releases_through_a_gate_without_a_reload(
    home: Warehouse, family: Path, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "both.yml").write_text(RECIPE + GATE)
    (folder / "eval.py").write_text("print('{\"size\": 1}')")
    project = Project(
        instance,
        theirs(family),
        build_inbox_defs(home=home.root),
        build_recipe_defs(folder, home=home.root, experts=EXPERTS),
    )
    assert project.defs.executor is SETTLED.executor
    assert (project.defs.resources or {})["engine"] == "their engine"
    assert project.deps("both/plan") >= {"training/math", "training/code", "expert_index"}
    assert project.tick("mergepipe_recipe_sensor") == []
    assert project.make("training/math", "training/code").success
    assert len(all_done(project.tick("mergepipe_inbox_sensor"))) == 2
    merged = project.tick("mergepipe_recipe_sensor")
    assert all_done(merged) == ["mergepipe_merge_both"]
    (gate,) = (e for e in merged[0].get_asset_check_evaluations() if e.check_name == "gate")
    assert gate.passed
    assert last_release(home, "both") is not None
    assert project.tick("mergepipe_recipe_sensor") == []
    layers = f"mergepipe:both layers:{identity_of(home)}"
    made = instance.get_materialized_partitions(dg.AssetKey(["both", "layers"]))
    assert made == set(instance.get_dynamic_partitions(layers)) != set()


def test_two_warehouses_stand_in_one_location_and_each_sensor_asks_for_its_own(
    home: Warehouse, tmp_path: Path, family: Path, instance: dg.DagsterInstance
) -> None:
    homes = {"one": home, "two": Warehouse.at(tmp_path / "second").ensure()}
    parts = list[dg.Definitions]()
    for prefix, warehouse in homes.items():
        makers = {name: f"{prefix}/training/{name}" for name in EXPERTS}
        parts += [
            theirs(family, f"{prefix}_mergepipe", prefix),
            build_inbox_defs(home=warehouse.root, key_prefix=prefix),
            build_recipe_defs(
                {"both": RECIPE}, home=warehouse.root, key_prefix=[prefix], experts=makers
            ),
            build_housekeeping(home=warehouse.root, key_prefix=prefix),
        ]
    project = Project(instance, *parts)
    assert project.make("one/training/math", "one/training/code").success
    for prefix in homes:
        assert len(project.tick(f"{prefix}_inbox_sensor")) == (2 if prefix == "one" else 0)
    assert all_done(project.tick("one_both_recipe_sensor")) == ["one_merge_both"]
    assert project.tick("two_both_recipe_sensor") == []
    assert project.make("two/training/math", "two/training/code").success
    for sensor in project.sensors - {"failure_sensor", "one_failure_sensor", "two_failure_sensor"}:
        project.tick(sensor)
    assert all_done(project.tick("two_both_recipe_sensor")) in (["two_merge_both"], [])
    for prefix, warehouse in homes.items():
        assert last_release(warehouse, "both") is not None
        release = dg.AssetKey([prefix, "both", "release"])
        event = instance.get_latest_materialization_event(release)
        assert event is not None
        run = instance.get_run_by_id(event.run_id)
        assert run is not None
        assert run.tags[WAREHOUSE_TAG] == identity_of(warehouse)


def told(project: Project, sensor: str) -> list[str]:
    """What a failure sensor tells of all runs that failed, to a webhook."""
    repository = project.defs.get_repository_def()
    with pytest.MonkeyPatch.context() as patch, webhook() as (url, posted):
        patch.setattr(failures, "_URL", url)
        for run in project.instance.get_runs(dg.RunsFilter(statuses=[Status.FAILURE])):
            (end,) = project.instance.all_logs(
                run.run_id, of_type=dg.DagsterEventType.PIPELINE_FAILURE
            )
            assert end.dagster_event is not None
            context = dg.build_run_status_sensor_context(
                sensor,
                end.dagster_event,
                project.instance,
                run,
                resources=repository.get_top_level_resources(),
            )
            with context.for_run_failure() as failure:
                repository.get_sensor_def(sensor)(failure)
        return sorted(said["text"] for said in posted)


@pytest.mark.parametrize("only_own", [True, False])
def test_failure_sensors_of_two_warehouses_tell_their_own_failures_alone(
    home: Warehouse, tmp_path: Path, family: Path, instance: dg.DagsterInstance, only_own: bool
) -> None:
    homes = {"one": home, "two": Warehouse.at(tmp_path / "second").ensure()}
    parts = list[dg.Definitions]()
    for prefix, warehouse in homes.items():

        @dg.asset(
            key=[prefix, "broken"],
            required_resource_keys={f"{prefix}_mergepipe"},
            partitions_def=dg.StaticPartitionsDefinition(["monday"]),
        )
        def broken() -> None:
            raise ValueError("a training breaks")

        for name, expert in (("math", "expert_00"), ("code", "expert_01")):
            shutil.copytree(family / expert, warehouse.inbox / name)
        failing = RECIPE + "evaluate: {command: [sh, -c, exit 1], retries: 0}\n"
        parts += [
            dg.Definitions([broken]),
            build_inbox_defs(home=warehouse.root, key_prefix=prefix),
            build_recipe_defs({prefix: failing}, home=warehouse.root, key_prefix=prefix),
            build_housekeeping(home=warehouse.root, key_prefix=prefix, only_own=only_own),
        ]
    project = Project(instance, *parts)
    for prefix in homes:
        all_done(project.tick(f"{prefix}_inbox_sensor"))
        (merged,) = project.tick(f"{prefix}_{prefix}_recipe_sensor")
        assert not merged.success
        trained = project.defs.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance,
            asset_selection=[dg.AssetKey([prefix, "broken"])],
            partition_key="monday",
            raise_on_error=False,
        )
        assert not trained.success
    for prefix in homes:
        said = [text.partition(": ")[0] for text in told(project, f"{prefix}_failure_sensor")]
        # A training is told by its job, not as the index of an expert of its partition's name.
        assert said == [f"Recipe {prefix} failed", *([] if only_own else ["__ASSET_JOB failed"])]


class Ours(MergePipeTranslator):
    """Puts a recipe's parts under `models`, and says who owns the release."""

    def get_asset_spec(self, props: MergePipeProps) -> dg.AssetSpec:
        spec = super().get_asset_spec(props)
        if not props.name:
            return spec
        spec = spec.replace_attributes(
            key=dg.AssetKey(["models", f"{props.name}_{props.part}"]), group_name="models"
        )
        if props.part != "release":
            return spec
        return spec.merge_attributes(owners=["team:models"], tags={"tier": "1"}, deps=["notice"])


def test_what_a_translator_says_of_an_asset_is_what_runs_and_sensors_report(
    home: Warehouse, family: Path, instance: dg.DagsterInstance
) -> None:
    project = Project(
        instance,
        theirs(family),
        build_inbox_defs(home=home.root, translator=Ours()),
        build_recipe_defs({"both": RECIPE}, home=home.root, translator=Ours(), experts=EXPERTS),
    )
    release = project.defs.resolve_asset_graph().get(dg.AssetKey(["models", "both_release"]))
    assert release.owners == ["team:models"]
    assert release.tags.items() >= {"recipe": "both", "tier": "1", "expert/math": ""}.items()
    assert (release.group_name, dg.AssetKey("notice") in release.parent_keys) == ("models", True)
    project.make("training/math", "training/code")
    all_done(project.tick("mergepipe_inbox_sensor"))
    job = project.defs.resolve_job_def("mergepipe_merge_both")
    working = dg.DagsterRun("__ASSET_JOB", asset_selection=frozenset([release.key]))
    working = working.with_status(Status.STARTED).with_tags({WAREHOUSE_TAG: identity_of(home)})
    instance.run_storage.add_historical_run(working, datetime.now(UTC))
    assert project.tick("mergepipe_both_recipe_sensor") == []  # that run works on it
    instance.delete_run(working.run_id)
    assert all_done(project.tick("mergepipe_both_recipe_sensor")) == [job.name]
    shown = {key.to_user_string() for key in instance.get_asset_keys()}
    assert shown >= {"models/both_release", "models/both_layers", "expert_index"}
    assert not {key for key in shown if key.startswith("both/")}


def test_housekeeping_of_a_guest_deletes_and_ends_runs_of_our_own_jobs_alone(
    home: Warehouse, family: Path, instance: dg.DagsterInstance
) -> None:
    house = build_housekeeping(home=home.root)
    project = Project(instance, theirs(family), house, build_inbox_defs(home=home.root))
    assert project.make("training/math").success  # it has the resource, and with it the tag
    long_ago, ours = datetime.now(UTC) - timedelta(days=40), {WAREHOUSE_TAG: identity_of(home)}
    work = {**ours, "mergepipe/recipe": "both"}
    for tags in ({}, ours, work):
        for status in (Status.SUCCESS, Status.STARTED):
            run = dg.DagsterRun("some", status=status, tags=tags)
            instance.run_storage.add_historical_run(run, long_ago)
    project.tick("mergepipe_retention_sensor")
    project.tick("mergepipe_orphans_sensor")
    left = [run.status for run in instance.get_runs() if run.tags == work]
    assert left == [Status.FAILURE]
    others = [run.status for run in instance.get_runs() if run.job_name == "some"]
    assert sorted(others, key=str).count(Status.STARTED) == 2
    assert len(instance.get_runs()) == 1 + 2 * 2 + 1


def test_a_window_of_a_run_that_has_not_begun_slides_as_its_steps_are_saved(
    home: Warehouse, family: Path, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    folder = tmp_path / "runs" / "sft"
    project = Project(
        instance,
        training_run := dg.Definitions(assets=[dg.AssetSpec("sft")]),
        build_inbox_defs(home=home.root),
        build_window_defs(folder, home=home.root, last=2, schedule="uniform", training="sft"),
    )
    assert training_run.assets
    assert "sft" in project.deps("window/plan")
    assert project.tick("mergepipe_window_recipe_sensor") == []
    taken = list[tuple[str, ...]]()
    for step, expert in ((100, "expert_00"), (200, "expert_01"), (300, "expert_02")):
        shutil.copytree(family / expert, folder / f"checkpoint-{step}")
        for _ in range(2):
            time.sleep(0.1)
            all_done(project.tick("mergepipe_inbox_sensor"))
        all_done(project.tick("mergepipe_window_recipe_sensor"))
        plan = current_plan(home, "window")
        taken.append(tuple(source.name for source in plan.sources))
    assert taken == [
        ("sft.step-100",),
        ("sft.step-100", "sft.step-200"),
        ("sft.step-200", "sft.step-300"),
    ]


def test_a_search_runs_in_a_project(
    home: Warehouse, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    world = World(tmp_path / "models")
    for name in ("base", "one", "zero"):
        register(home, world.folder / name)
    (home.searches / "eval.py").write_text(EVALUATOR)
    text = SEARCH + "evaluations: 2\ninitial: 2\nworkers: 2\n"
    project = Project(
        instance,
        build_inbox_defs(home=home.root),
        build_search_defs({"mix": text}, home=home.root),
    )
    done = [all_done(project.tick("mergepipe_mix_search_sensor")) for _ in range(4)]
    evaluated = ["mergepipe_evaluate_mix"] * 2
    assert done == [["mergepipe_begin_mix"], evaluated, ["mergepipe_show_mix"], []]
    assert front(home, search_of(home, "mix")).best
