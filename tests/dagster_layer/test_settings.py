"""Settings: from the environment and from a run's config, refused by name where they are wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resources import Engine
from mergepipe_pipeline.sensors.ticks import attempt_of
from mergepipe_pipeline.settings import BUDGET, MEMORY, SETTINGS, THREADS, Setting
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.deploy import current_plan, last_release
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.dagster_layer.test_attempts import Sensor
from tests.dagster_layer.test_experts import sum_of
from tests.dagster_layer.test_release import error_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
ROOT = Path(__file__).parents[2]
#: A setting's variable without its prefix, and values that are none of it.
WRONG = {
    "THREADS": ["many", "0", "-1", "1.5", "1_0", " 2"],
    "MEMORY_MIB": ["-1", "64MiB", "9999999999"],
    "DEVICE": ["gpu", "cuda:", "cuda:x"],
    "BUDGET": ["lots", "25", "-1%", "error=2"],
    "INBOX_QUIET_S": ["-1", "nan", "inf", "1e3"],
    "INBOX_RETRY_S": ["soon"],
    "PACK": ("yes", "2"),
    "SHARDS": ("0", "513", "two"),
    "EXECUTOR": ("threads", "Dask"),
    "RETRY_S": ["30s"],
    "SENSOR_INTERVAL_S": ["0", "0.5"],
    "KEEP_RUNS_DAYS": ["-30"],
    "KEEP_VERSIONS": ["0", "many"],
    "STALLED_S": ["-1", "1h"],
    "WEBHOOK": ("hooks.example.org/x", "ftp://a", "https://a b"),
    "OWNERS": ("ann", "team:", "ann@example.org, a b"),
}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.variable)
def test_a_wrong_value_is_refused_with_the_name_of_its_variable(
    setting: Setting[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in WRONG[setting.variable.removeprefix("MERGEPIPE_")]:
        monkeypatch.setenv(setting.variable, text)
        with pytest.raises(MergePipeError, match=rf"Where: {setting.variable}.*Expected .* found"):
            setting.value()


def test_a_right_value_is_taken_and_an_empty_variable_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(THREADS.variable, "3")
    assert THREADS.value() == 3
    monkeypatch.setenv(THREADS.variable, "")
    assert THREADS.value() is None
    usual = EngineOptions()
    suited = (usual, usual.past_cache(), usual.with_packs())
    assert re.findall(r"\d+", MEMORY.shown) == [str(s.most_bytes >> 20) for s in suited]


def test_no_other_module_knows_a_variable() -> None:
    found = {
        (path.name, name)
        for folder in ("mergepipe_pipeline", "assets", "sensors")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'"(MERGEPIPE_\w+)"', path.read_text())
    }
    assert {name for path, name in found if path == "settings.py"} == {s.variable for s in SETTINGS}
    # The demo starts Dagster, as a user does, and an evaluator its program: both give variables.
    given = {"demo_run.py", "evaluators.py"}
    elsewhere = {name for path, name in found if path not in {"settings.py", *given}}
    assert elsewhere == {
        "MERGEPIPE_BUCKET",
        "MERGEPIPE_HOME",
        "MERGEPIPE_ROOTS",
        "MERGEPIPE_TRACEBACK",
        "MERGEPIPE_DOWNLOADS",
        "MERGEPIPE_CACHE_LIMIT",
    }


def launch(
    home: Warehouse, instance: dg.DagsterInstance, **engine: object
) -> dg.ExecuteInProcessResult:
    """Start recipe r's job as from the launchpad, with a config of the engine."""
    job = build_definitions(home).resolve_job_def("merge_r")
    config = {"resources": {"engine": {"config": engine}}}
    return job.execute_in_process(run_config=config, instance=instance, raise_on_error=False)


def test_a_runs_budget_is_released_and_recorded_and_asks_for_no_other_merge(
    home: Warehouse, instance: dg.DagsterInstance, ticker: Ticker, drop: Drop
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    home.recipe_path("r").write_text(sum_of("base", "expert_00"))
    ticker.tick()
    full = current_plan(home, "r").estimates
    assert full.budget_bytes is None
    run = launch(home, instance, budget="50%", threads=1, memory_mib=8, device="cpu")
    assert run.success
    plan = current_plan(home, "r")
    assert 0 < plan.estimates.expert_bytes_planned <= full.expert_bytes_total // 2
    assert plan.request.budget == "50%"
    released = last_release(home, "r")
    assert released is not None
    assert (released.sequence, released.plan_id) == (2, plan.plan_id)
    assert ticker.tick() == []
    assert "r: the release is current" in ticker.reasons()[1]
    drop("expert_00", "expert_02")
    assert [run["job"] for run in ticker.tick()] == ["index_experts", "merge_r"]
    assert current_plan(home, "r").estimates.budget_bytes is None


def test_a_wrong_value_of_a_runs_config_fails_it_before_any_step(
    home: Warehouse, family: Path, instance: dg.DagsterInstance
) -> None:
    for name in ("base", "expert_00"):
        register(home, family / name, name)
    home.recipe_path("r").write_text(sum_of("base", "expert_00"))
    run = launch(home, instance, threads=0)
    assert not run.success
    assert not [event for event in run.all_events if event.is_step_start]
    told = attempt_of(instance, run.run_id)
    assert "Where: resources > engine > config > threads. Expected" in told.error


@pytest.fixture
def asked(
    home: Warehouse, family: Path, instance: dg.DagsterInstance
) -> tuple[Sensor, dg.RunRequest]:
    """The sensor of recipe r, and the run that it asked for, which failed for want of a process."""
    for name in ("base", "expert_00"):
        register(home, family / name, name)
        index_arrival(home, name)
    home.recipe_path("r").write_text(sum_of("base", "expert_00"))
    sensor = Sensor(home, instance)
    ((request,), _) = sensor.tick()
    sensor.ends(request, dg.DagsterRunStatus.FAILURE)
    return sensor, request


def re_execute(
    sensor: Sensor, request: dg.RunRequest, *assets: str, **engine: object
) -> dg.ExecuteInProcessResult:
    """Execute a request again as from the launchpad, which keeps its tags, with a config."""
    job = build_definitions(sensor.home).resolve_job_def("merge_r")
    return job.execute_in_process(
        run_config={"resources": {"engine": {"config": engine}}},
        instance=sensor.instance,
        tags={**request.tags, "dagster/parent_run_id": sensor.instance.get_runs()[-1].run_id},
        asset_selection=[dg.AssetKey(["r", asset]) for asset in assets] or None,
        raise_on_error=False,
    )


def test_a_run_of_the_sensor_executed_again_with_a_budget_has_it_and_ends_the_asking(
    asked: tuple[Sensor, dg.RunRequest],
) -> None:
    sensor, request = asked
    run = re_execute(sensor, request, budget="50%")
    assert run.success
    (told,) = run.asset_materializations_for_node("r__plan")
    assert told.metadata["budget from"].value == "the configuration of this run: 50%"
    for _ in range(2):
        assert sensor.tick() == ([], "r: the release is current")


def test_a_wrong_budget_of_a_person_does_not_end_the_attempts_of_the_sensor(
    asked: tuple[Sensor, dg.RunRequest],
) -> None:
    sensor, request = asked
    for _ in range(3):
        assert not re_execute(sensor, request, budget="lots").success
    ((again,), _) = sensor.tick()
    assert again.tags["mergepipe/attempt"] == "2"


def test_a_budget_that_the_plan_does_not_have_is_not_passed_over(
    asked: tuple[Sensor, dg.RunRequest],
) -> None:
    sensor, request = asked
    assert re_execute(sensor, request, "plan").success
    run = re_execute(sensor, request, "merge", "snapshot", "release", budget="50%")
    assert "The current plan has another budget than this run asks for" in error_of(run)
    assert last_release(sensor.home, "r") is None


def test_a_budget_of_the_environment_is_told_by_its_variable(
    home: Warehouse,
    family: Path,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(budget="25%")
    monkeypatch.setenv(BUDGET.variable, "25%")
    assert engine.budget_from("25%") == "MERGEPIPE_BUDGET: 25%"
    assert engine.budget_from(None) == "the recipe"
    monkeypatch.delenv(BUDGET.variable)
    assert engine.budget_from("25%") == "the configuration of this run: 25%"
