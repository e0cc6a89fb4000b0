"""What a person finds in the UI: who is asked, what each thing does, where links lead."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline.assets.labels import owners
from mergepipe_pipeline.assets.status import changed_status
from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.deploy.retry import Attempt, Fault
from mergepipe_pipeline.deploy.standing import failing, standing
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.deploy import current_plan, excess
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, records_of, shown
from tests.dagster_layer.test_experts import jobs, sum_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
NIGHTLY = "trigger: nightly\nschedule: '30 2 * * 1-5'\ntimezone: Europe/Berlin\n"


@pytest.fixture
def known(home: Warehouse, family: Path) -> Warehouse:
    """Recipes a and n over registered models; n has a schedule."""
    for name in ("base", "expert_00"):
        register(home, family / name, name)
    home.recipe_path("a").write_text(sum_of("base", "expert_00"))
    home.recipe_path("n").write_text(sum_of("base", "expert_00") + NIGHTLY)
    return home


def described(home: Warehouse) -> Iterator[tuple[str, str | None]]:
    defs = build_definitions(home)
    repository, graph = defs.get_repository_def(), defs.resolve_asset_graph()
    parts: list[dg.SensorDefinition | dg.ScheduleDefinition]
    parts = [*repository.sensor_defs, *repository.schedule_defs]
    for part in parts:
        yield part.name, part.description
    for job in repository.get_all_jobs():
        if not job.name.startswith("__"):
            yield job.name, job.description
    keys: list[dg.AssetKey | dg.AssetCheckKey]
    keys = [*graph.get_all_asset_keys(), *graph.asset_check_keys]
    for key in keys:
        yield key.to_user_string(), graph.get(key).description


def test_everything_says_in_its_first_sentence_what_it_does(known: Warehouse) -> None:
    found = dict(described(known))
    assert len(found) > 25
    for name, text in found.items():
        first = (text or "").partition(". ")[0].partition(".\n")[0]
        assert 20 < len(first) <= 200, (name, text)


def test_owners_are_those_of_the_environment(
    known: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MERGEPIPE_OWNERS", "ann@example.org, team:models")
    graph = build_definitions(known).resolve_asset_graph()
    # Those of the warehouse are made when their modules are imported.
    made = {dg.AssetKey("expert_index"), dg.AssetKey("free_space")}
    for key in graph.get_all_asset_keys() - made:
        assert graph.get(key).owners == ["ann@example.org", "team:models"]
        assert 1 <= len(graph.get(key).kinds) <= 3


def test_a_wrong_owner_is_refused_with_the_name_of_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for wrong in ("ann", "team:", "ann@", "a b@example.org", "team:a b"):
        monkeypatch.setenv("MERGEPIPE_OWNERS", wrong)
        with pytest.raises(MergePipeError, match="MERGEPIPE_OWNERS"):
            owners()


def test_only_a_recipe_with_a_schedule_can_be_overdue(known: Warehouse) -> None:
    graph = build_definitions(known).resolve_asset_graph()
    policies = {key: graph.get(key).freshness_policy for key in graph.get_all_asset_keys()}
    (key,) = [key for key, policy in policies.items() if policy]
    assert key == dg.AssetKey(["n", "on_schedule"])
    # From Friday to Monday, and six hours; an hour more or less when clocks change between.
    hours = [72 + 6 + change for change in (-1, 0, 1)]
    wanted = [
        dg.FreshnessPolicy.time_window(timedelta(hours=h), timedelta(hours=h - 4)) for h in hours
    ]
    assert policies[key] in wanted


def test_a_night_that_changes_nothing_is_no_delay_and_asks_nothing_of_assets_downstream(
    home: Warehouse, drop: Drop, tmp_path: Path
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    when = "trigger: change\nschedule: '30 2 * * *'\n"
    home.recipe_path("a").write_text(sum_of("base", "expert_00") + when)
    release, passed = dg.AssetKey(["a", "release"]), dg.AssetKey(["a", "on_schedule"])

    @dg.asset(deps=[release], automation_condition=dg.AutomationCondition.eager())
    def serving() -> None:
        """Somebody's own asset, made anew whenever there is another release."""

    with dg.DagsterInstance.local_temp(str(tmp_path)) as kept:
        ticker = Ticker(home, kept)
        assert jobs(ticker.tick())[-1] == "merge_a"
        definitions = build_definitions(home)
        schedule = definitions.get_repository_def().get_schedule_def("nightly_merge_a")
        whole = dg.Definitions.merge(definitions, dg.Definitions([serving]))
        kept.report_runless_asset_event(dg.AssetMaterialization(serving.key))
        asked = dg.evaluate_automation_conditions(whole, kept)
        before = kept.get_latest_materialization_event(passed)
        resources = {"mergepipe": MergePipe(home=str(home.root))}
        with dg.build_schedule_context(instance=kept, resources=resources) as context:
            assert "current" in str(schedule.evaluate_tick(context).skip_message)
        asked = dg.evaluate_automation_conditions(whole, kept, cursor=asked.cursor)
        assert asked.total_requested == 0, "a night that changed nothing"
        after = kept.get_latest_materialization_event(passed)
        assert before is not None
        assert after is not None
        assert before.timestamp < after.timestamp
        shutil.rmtree(home.inbox / "expert_00")
        drop("expert_00", "expert_02")
        assert jobs(ticker.tick())[-1] == "merge_a"
        asked = dg.evaluate_automation_conditions(whole, kept, cursor=asked.cursor)
        assert asked.total_requested == 1


def test_an_expert_leads_to_its_recipes_and_a_snapshot_to_its_manifest_and_inputs(
    home: Warehouse, ticker: Ticker, drop: Drop, instance: dg.DagsterInstance
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    home.recipe_path("a").write_text(sum_of("base", "expert_00"))
    ticker.tick()

    assert "tag%3A%22expert%2Fexpert_00%22" in str(shown(instance, "expert_index")["used by"])
    snapshot, release, report = (
        shown(instance, "a", asset) for asset in ("snapshot", "release", "report")
    )
    first = records_of(report["read of each expert"])[0]
    assert set(first) == {"layer", "expert_00"}
    assert " of " in str(first["expert_00"])
    assert report.keys() & shown(instance, "a", "plan").keys() == {"plan id"}
    assert Path(str(snapshot["manifest"])).is_file()
    assert {"base", "expert_00"} == {row["name"] for row in records_of(snapshot["inputs"])}
    assert release["snapshot"] == dg.AssetKey(["a", "snapshot"])
    assert 0 < float(str(snapshot["expert GiB read"])) < 0.01
    plan = current_plan(home, "a")
    over = replace(plan, estimates=replace(plan.estimates, budget_bytes=1000))
    assert excess(plan) is None
    file = f"from expert expert_00, file model.safetensors of {home.inbox / 'expert_00'}, tensor "
    assert file in (excess(over) or "")
    assert {word for words in shown_keys(instance) for word in words if "_" in word} == set()
    assert {("seconds", "to", step) for step in ("index", "compare", "plan", "merge")} <= (
        measured := {words for words in shown_keys(instance) if "seconds" in words}
    )
    assert ("seconds",) not in measured


def test_an_empty_warehouse_says_what_to_do_first(
    home: Warehouse, ticker: Ticker, instance: dg.DagsterInstance
) -> None:
    land = (
        f"put a model's folder into {home.inbox} or run `mergepipe --home {home.root} land MODEL`"
    )
    write = f"write a recipe to {home.recipes}/NAME.yml"
    first = f"The warehouse {home.root} is empty: first {land}, then {write}"
    assert ticker.reasons() == [first, first]
    assert shown(instance, "pipeline_status")["what to do first"] == first
    told = dict(described(home))
    for asset in ("expert_index", "pipeline_status"):
        assert f"{home.inbox} or run \\`mergepipe" in str(told[asset])
    home.recipe_path("n").write_text(sum_of("base", "expert_00"))
    assert f"There is no model yet: {land}" in ticker.reasons()


def test_the_status_says_where_recipes_are_and_is_written_only_when_that_changes(
    known: Warehouse, ticker: Ticker, instance: dg.DagsterInstance
) -> None:
    known.recipe_path("x").write_text("merge_method: none\n")
    written = [ticker.reasons() and versions(instance) for _ in range(3)]
    assert written == [1, 1, 1]
    rows = {row["recipe"]: row for row in records_of(shown(instance, "pipeline_status")["recipes"])}
    assert rows["a"]["state"] == "waiting"
    assert rows["a"]["next"] == "it goes on by itself once that is over"
    assert rows["x"]["state"] == "cannot be used"
    assert str(rows["x"]["why"]).startswith("1. models: this key is required and missing")
    assert "2. line 1, merge_method: unknown" in str(rows["x"]["why"])
    assert rows["x"]["next"] == "correct all of these; nothing was read or written."
    before = rows["a"]["since"]
    known.recipe_path("x").unlink()
    ticker.reasons()
    assert versions(instance) == 2
    rows = {row["recipe"]: row for row in records_of(shown(instance, "pipeline_status")["recipes"])}
    assert "x" not in rows
    assert rows["a"]["since"] == before


def versions(instance: dg.DagsterInstance) -> int:
    """How often the status was written."""
    key = dg.AssetKey("pipeline_status")
    return len(instance.fetch_materializations(key, limit=100).records)


def test_a_status_of_many_recipes_stays_small_and_shows_first_what_is_not_current(
    recipe_file: RecipeFile, instance: dg.DagsterInstance
) -> None:
    states = {f"r{n:03d}": standing(recipe_file, "current", "c " * 2000) for n in range(500)}
    states["z"] = failing(recipe_file, [Attempt(0.0, "it broke", Fault.UNKNOWN)], "in 30 s", 30.0)
    (event,) = changed_status(instance, {}, states, None, datetime(2026, 1, 2, tzinfo=UTC))
    rows = records_of(event.metadata["recipes"])
    assert len(rows) <= 60
    assert len(str(rows)) < 30_000
    assert event.metadata["recipes in all"].value == 501
    assert dict(rows[0]) == {
        "recipe": "z",
        "state": "failing",
        "why": "attempt 1 failed: it broke",
        "since": "2026-01-02 00:00 UTC",
        "next": "it is tried again at 00:00:30 UTC",
    }


def shown_keys(instance: dg.DagsterInstance) -> set[tuple[str, ...]]:
    """The words of each key under which the last run of any asset or check shows something."""
    found = set()
    for run in instance.get_runs():
        for log in instance.all_logs(run.run_id):
            event = log.dagster_event
            if event and event.is_step_materialization:
                found |= set(event.step_materialization_data.materialization.metadata)
            elif event and event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION:
                found |= set(event.asset_check_evaluation_data.metadata)
    return {tuple(key.split()) for key in found}
