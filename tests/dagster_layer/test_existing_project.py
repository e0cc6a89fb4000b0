"""A gated merge in a project that has an executor, resources, sensors and trainings of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mergepipe_pipeline.dagster import (
    build_housekeeping,
    build_inbox_defs,
    build_recipe_defs,
    door,
)
from mergepipe_pipeline.deploy.instance import identity_of
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.warehouse import Warehouse

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

RECIPE = """merge_method: linear
models:
  - {model: math, parameters: {weight: 0.5}}
  - {model: code, parameters: {weight: 0.5}}
"""


@pytest.fixture(autouse=True)
def _known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "spreading", lambda: lambda: True)


def training(name: str, source: Path, resource: str = "mergepipe") -> dg.AssetsDefinition:
    """An asset of somebody's that trains an expert and lands it."""

    @dg.asset(key=["training", name], required_resource_keys={resource})
    def train(context: dg.AssetExecutionContext) -> None:
        getattr(context.resources, resource).land(source, name)

    return train


class Project:
    """Definitions as a code location serves them, on an instance; sensors keep their cursors."""

    def __init__(self, defs: dg.Definitions, instance: dg.DagsterInstance) -> None:
        dg.Definitions.validate_loadable(defs)
        self.defs, self.instance = defs, instance
        self._cursors: dict[str, str | None] = {}

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
        self._cursors[sensor] = found.cursor
        for added in found.dynamic_partitions_requests or ():
            names = list(added.partition_keys)
            self.instance.add_dynamic_partitions(added.partitions_def_name, names)
        return [self.run(r.job_name, r.partition_key, r.tags) for r in found.run_requests or ()]

    def run(
        self, job: str, partition: str | None = None, tags: Mapping[str, str] | None = None
    ) -> dg.ExecuteInProcessResult:
        """Run a job in this process."""
        return self.defs.resolve_job_def(job).execute_in_process(
            instance=self.instance, partition_key=partition, tags=dict(tags or {})
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


@dg.run_failure_sensor
def failure_sensor(context: dg.RunFailureSensorContext) -> None:
    """One of theirs, with a name that ours might have."""


def theirs(family: Path, resource: str = "mergepipe") -> dg.Definitions:
    """A project before it merges anything."""
    made = {"math": "expert_00", "code": "expert_01"}
    return dg.Definitions(
        assets=[training(name, family / source, resource) for name, source in made.items()],
        resources={"engine": "their engine"},
        sensors=[failure_sensor],
        executor=dg.in_process_executor,
    )


EXPERTS: dict[str, door.Asset] = {
    "math": "training/math",
    "code": dg.AssetKey(["training", "code"]),
}


def test_a_project_trains_indexes_merges_and_releases_without_a_reload(
    home: Warehouse, family: Path, instance: dg.DagsterInstance
) -> None:
    mine = theirs(family)
    project = Project(
        dg.Definitions.merge(
            mine,
            build_inbox_defs(home=home.root),
            build_recipe_defs({"both": RECIPE}, home=home.root, experts=EXPERTS),
            build_housekeeping(home=home.root),
        ),
        instance,
    )
    assert project.defs.executor is mine.executor
    assert (project.defs.resources or {})["engine"] == "their engine"
    assert project.deps("both/plan") >= {"training/math", "training/code", "expert_index"}
    assert project.tick("mergepipe_both_recipe_sensor") == []
    assert project.make("training/math", "training/code").success
    indexed = project.tick("mergepipe_inbox_sensor")
    assert [r.success for r in indexed] == [True, True]
    (merged,) = project.tick("mergepipe_both_recipe_sensor")
    assert merged.success
    released = last_release(home, "both")
    assert released is not None
    assert project.tick("mergepipe_both_recipe_sensor") == []
    layers = f"mergepipe:both layers:{identity_of(home)}"
    made = instance.get_materialized_partitions(dg.AssetKey(["both", "layers"]))
    assert made == set(instance.get_dynamic_partitions(layers)) != set()
