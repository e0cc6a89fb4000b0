"""What fails says so in one text, the cause first, and whether it is worth another try."""

from __future__ import annotations

import dagster as dg
import pytest

from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.deploy.retry import Fault
from mergepipe_pipeline.execution.plan_leases import lease_recipe
from mergepipe_pipeline.sensors.ticks import failed_attempts
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.guests import ours_of
from tests.dagster_layer.test_changed_inputs import replace_shard
from tests.dagster_layer.test_release import materialise

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def failure_of(home: Warehouse, instance: dg.DagsterInstance, asset: str) -> str:
    """What the one failed step of a run says first."""
    events = materialise(home, instance, asset).all_events
    (data,) = [e.step_failure_data for e in events if e.is_step_failure]
    assert data.error is not None
    assert data.error.cls_name == "Failure"
    return str(data.error.message).removeprefix("dagster._core.definitions.events.Failure: ")


def test_every_asset_of_a_recipe_that_fails_leads_with_the_cause(
    home: Warehouse, recipe_file: RecipeFile, instance: dg.DagsterInstance
) -> None:
    for asset in ("merge", "snapshot", "release", "report"):
        said = failure_of(home, instance, asset)
        assert said.startswith("A recipe has no plan yet. Where: n."), asset
    replace_shard(home, 1)
    said = failure_of(home, instance, "conflicts")
    assert said.startswith("expert_01 waits for its index")


def test_a_failed_run_is_tried_again_unless_its_cause_would_come_again(
    home: Warehouse, recipe_file: RecipeFile, instance: dg.DagsterInstance
) -> None:
    with lease_recipe(home, "n"):
        failure_of(home, instance, "plan")
    replace_shard(home, 1)
    failure_of(home, instance, "plan")
    home.current_plan_path("n").write_text("{}")
    failure_of(home, instance, "report")
    busy, changed, damaged = failed_attempts(ours_of(home, instance), {})
    assert (busy.fault, busy.number) == (Fault.SURROUNDINGS, 1)
    assert busy.error.startswith("Somebody else works on this recipe. Where: n. Found process ")
    assert (changed.fault, changed.number) == (Fault.SURROUNDINGS, 2)
    assert (damaged.fault, damaged.number) == (Fault.LASTING, 3)
    assert "n.current.json" in damaged.error
