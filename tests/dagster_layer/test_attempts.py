"""A merge that failed is asked for again, later each time, as often as its fault allows."""

from __future__ import annotations

import os
import re
import runpy
import time
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.deploy.retry import LONGEST_PAUSE_S, Attempt, Fault, pause_s, reason_to_wait
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors import housekeeping, recipes, reload
from mergepipe_pipeline.sensors.ticks import MAX_LINES
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.deploy import current, due
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.dagster_layer.guests import origins
from tests.dagster_layer.test_experts import jobs, sum_of

pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore::Warning")]


class Sensor:
    """The recipe sensor of a warehouse, and what becomes of the runs that it requests."""

    def __init__(self, home: Warehouse, instance: dg.DagsterInstance) -> None:
        self.home, self.instance = home, instance

    def tick(
        self, pause_s: float = 0, repository: dg.RepositoryDefinition | None = None
    ) -> tuple[list[dg.RunRequest], str]:
        """What one tick requests, and what it says; its definitions are made anew by default."""
        repository = repository or build_definitions(self.home).get_repository_def()
        with dg.build_sensor_context(
            instance=self.instance,
            repository_def=repository,
            resources={"mergepipe": MergePipe(home=str(self.home.root), retry_s=pause_s)},
        ) as context:
            result: Any = repository.get_sensor_def("recipe_sensor")(context)
        said = result.skip_reason.skip_message if result.skip_reason else ""
        return list(result.run_requests or []), said

    def ends(self, request: dg.RunRequest, status: Status) -> None:
        """A run of the request ends so."""
        job = build_definitions(self.home).resolve_job_def(str(request.job_name))
        run = self.instance.create_run_for_job(job, tags=request.tags)
        if status is Status.FAILURE:
            self.instance.report_run_failed(run, "its process is gone")
        elif status is Status.CANCELED:
            self.instance.report_run_canceled(run)


@pytest.fixture
def sensor(home: Warehouse, instance: dg.DagsterInstance, ticker: Ticker, drop: Drop) -> Sensor:
    """Recipes a and b, ready to be merged."""
    for name in ("base", "expert_00"):
        drop(name)
    assert jobs(ticker.tick()) == ["base", "expert_00"]
    home.recipe_path("a").write_text(sum_of("base", "expert_00"))
    home.recipe_path("b").write_text("- no recipe\n")
    return Sensor(home, instance)


def test_a_run_that_was_cancelled_is_asked_for_again_with_its_number_and_not_for_ever(
    sensor: Sensor,
) -> None:
    for attempt in ("1", "2", "3"):
        ((request,), _) = sensor.tick()
        assert request.tags["mergepipe/attempt"] == attempt
        assert str(request.run_key).endswith(f":{attempt}")
        sensor.ends(request, Status.CANCELED)
    requests, said = sensor.tick()
    assert not requests
    assert re.search(r"a: failing after 3 attempts.*the last error: it", said)
    assert "b: a recipe is a mapping with `merge_method:`" in said
    sensor.home.recipe_path("a").write_text(sum_of("base", "expert_00").replace("0.5", "0.4"))
    ((request,), _) = sensor.tick()
    assert request.tags["mergepipe/attempt"] == "1"


def test_a_failed_run_is_not_asked_for_again_at_once(sensor: Sensor) -> None:
    ((request,), _) = sensor.tick()
    sensor.ends(request, Status.FAILURE)
    requests, said = sensor.tick(pause_s=1000)
    assert not requests
    told = r"a: the next attempt comes in \d+ s, after 1 that failed, and so on until one works"
    assert re.search(f"{told}; the last: its process is gone", said)


def test_a_run_whose_process_dies_is_asked_for_again_as_often_as_it_takes(sensor: Sensor) -> None:
    for attempt in range(1, 24):
        ((request,), _) = sensor.tick()
        assert request.tags["mergepipe/attempt"] == str(attempt)
        sensor.ends(request, Status.FAILURE)
    requests, said = sensor.tick(pause_s=1.0)
    assert not requests
    assert re.search(
        r"a: the next attempt comes in 3[56]\d\d s, after 23 that failed, and so", said
    )


def test_a_run_that_somebody_deleted_leaves_its_number_to_no_other(sensor: Sensor) -> None:
    keys = set()
    for _ in range(2):
        ((request,), _) = sensor.tick()
        keys.add(request.run_key)
        sensor.ends(request, Status.FAILURE)
    (_, first) = sensor.instance.get_run_ids(dg.RunsFilter(job_name="merge_a"))
    sensor.instance.delete_run(first)
    ((request,), _) = sensor.tick()
    # Dagster launches no run of a key that another one has, and says nothing.
    assert request.run_key not in keys


def test_a_run_that_was_made_and_not_queued_ends_and_is_asked_for_again(
    sensor: Sensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((request,), _) = sensor.tick()
    defs = build_definitions(sensor.home)
    merge, burst = map(defs.resolve_job_def, ("merge_a", "index_burst"))
    config = {"ops": {"index_several": {"config": {"experts": ["base"]}}}}
    made = [
        sensor.instance.create_run_for_job(merge, tags=request.tags),
        sensor.instance.create_run_for_job(burst, run_config=config, **origins("index_burst")),
    ]
    assert "a: a run is under way" in sensor.tick()[1]
    mergepipe = MergePipe(home=str(sensor.home.root))
    for silence_s, status in ((housekeeping.SILENCE_S, Status.NOT_STARTED), (0.0, Status.FAILURE)):
        monkeypatch.setattr(housekeeping, "SILENCE_S", silence_s)
        with dg.build_sensor_context(sensor.instance, resources={"mergepipe": mergepipe}) as tick:
            housekeeping.build_orphans_sensor()(tick)
        found = [sensor.instance.get_run_by_id(run.run_id) for run in made]
        assert [run.status for run in found if run] == [status, status]
    ((again,), _) = sensor.tick()
    assert again.run_key != request.run_key


def test_a_run_of_somebodys_choice_of_assets_is_waited_for(sensor: Sensor) -> None:
    defs = build_definitions(sensor.home)
    sensor.instance.create_run_for_job(
        defs.resolve_implicit_global_asset_job_def(),
        asset_selection=frozenset([dg.AssetKey(["a", "plan"])]),
        **origins("__ASSET_JOB"),
    )
    requests, said = sensor.tick()
    assert not requests
    assert "a: a run is under way" in said


def test_a_tick_that_requests_a_run_tells_of_every_recipe_in_its_log(
    sensor: Sensor, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(sensor.tick()[0]) == 1
    told = capfd.readouterr().err
    assert "a: a run is requested, attempt 1" in told
    assert "b: a recipe is a mapping with `merge_method:`" in told


def test_an_idle_tick_counts_many_recipes_that_are_current_and_tells_of_few_others(
    sensor: Sensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        recipes, "due", lambda home, file: due(home, file) if file.problem else current(file)
    )
    for n in range(MAX_LINES):
        sensor.home.recipe_path(f"a{n}").write_text(sum_of("base", "expert_00"))
    _, said = sensor.tick()
    first, last = said.splitlines()
    assert first.startswith("• b: ")
    assert last == f"• {MAX_LINES + 1} recipes: the release is current"
    for n in range(MAX_LINES):
        sensor.home.recipe_path(f"a{n}").write_text("- no recipe\n")
    lines = sensor.tick()[1].splitlines()
    assert len(lines) == MAX_LINES + 2
    assert lines[-2:] == ["• 1 more", "• 1 recipes: the release is current"]


def test_pauses_grow_to_an_hour_and_the_fault_says_how_often_the_same_is_tried() -> None:
    unknown = [Attempt(0.0, "a bug", Fault.UNKNOWN, 1), Attempt(100.0, "a bug", Fault.UNKNOWN, 2)]
    assert reason_to_wait([], 0.0, 30.0) is None
    assert reason_to_wait(unknown[:1], 30.0, 30.0) is None
    assert "attempt comes in 10 s" in str(reason_to_wait(unknown[:1], 20.0, 30.0))
    assert "attempt comes in 120 s" in str(reason_to_wait(unknown, 100.0, 30.0))
    third = Attempt(200.0, "a bug", Fault.UNKNOWN, 3)
    assert "failing after 3 attempts" in str(reason_to_wait([*unknown, third], 1e9, 30.0))
    full = [Attempt(0.0, "no disk", Fault.SURROUNDINGS, n) for n in (98, 99, 100)]
    assert "attempt comes in 3600 s, after 100" in str(reason_to_wait(full, 0.0, 30.0))
    assert reason_to_wait(full, LONGEST_PAUSE_S, 30.0) is None
    # A fault of its own among them does not end it.
    assert reason_to_wait([*full[:2], third], 1e9, 30.0) is None
    lasting = [Attempt(0.0, "no such expert", Fault.LASTING)]
    assert "until the recipe or an input changes" in str(reason_to_wait(lasting, 1e9, 30.0))
    assert [pause_s(30.0, n) for n in (1, 2, 3, 4, 5, 10_000)] == [30, 120, 480, 1920, 3600, 3600]
    assert [pause_s(7200.0, n) for n in (1, 2)] == [7200, 7200]
    assert pause_s(0.0, 10_000) == 0


def test_a_clock_that_is_set_back_makes_no_attempt_wait_longer_than_two_pauses() -> None:
    last = Attempt(1e9, "no disk", Fault.SURROUNDINGS, 1)
    assert "attempt comes in 31 s" in str(reason_to_wait([last], 1e9 - 1, 30.0))
    assert reason_to_wait([last], 1e9 - 86400, 30.0) is None


def test_a_merge_waits_until_the_daemon_knows_its_job_and_no_longer_if_the_clock_is_set_back(
    sensor: Sensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "_SPREADING_S", 0.0)
    monkeypatch.setattr(reload, "_age_s", lambda: 2.0)
    now_s = time.time
    monkeypatch.setenv("MERGEPIPE_HOME", str(sensor.home.root))
    loaded = runpy.run_module("mergepipe_pipeline.definitions")["defs"].get_repository_def()
    monkeypatch.setattr(time, "time", lambda: now_s() - 86400)
    # The first tick began before this process took over, however long it took to load.
    assert "a: its definitions are being loaded" in sensor.tick(repository=loaded)[1]
    time.sleep(0.5)
    requests, said = sensor.tick(repository=loaded)
    assert [r.job_name for r in requests] == ["merge_a"], said


def test_an_input_of_a_time_after_now_has_a_failure_that_lasts_tried_no_more_often(
    sensor: Sensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((request,), _) = sensor.tick()
    monkeypatch.setattr(recipes, "failed_attempts", lambda *_: [_refused(time.time())])
    monkeypatch.setattr(recipes, "last_written_s", lambda *_: time.time() + 86400)
    assert "failing and would again" in sensor.tick()[1]
    monkeypatch.setattr(recipes, "last_written_s", lambda *_: time.time())
    assert [r.job_name for r in sensor.tick()[0]] == [request.job_name]


def _refused(ended_s: float) -> Attempt:
    return Attempt(ended_s, "no such tensor", Fault.LASTING)


def test_an_input_that_was_mended_is_tried_again_though_its_contents_are_those_of_before(
    sensor: Sensor, ticker: Ticker
) -> None:
    for _ in range(3):
        ((request,), _) = sensor.tick()
        sensor.ends(request, Status.CANCELED)
    requests, said = sensor.tick()
    assert not requests
    assert "failing after 3 attempts" in said
    for file in (sensor.home.inbox / "expert_00").iterdir():
        os.utime(file)  # as a copy of the same file has it
    assert "expert_00" in jobs(ticker.tick())
    assert sensor.home.catalog.get("expert_00").version == 2
    assert history(sensor.home, "a")


@pytest.mark.parametrize("lost", ["record", "snapshot", "ref"])
def test_a_release_whose_record_snapshot_or_ref_is_lost_is_made_once_more(
    sensor: Sensor, ticker: Ticker, lost: str
) -> None:
    assert jobs(ticker.tick()) == ["merge_a"]
    assert jobs(ticker.tick()) == []
    home = sensor.home
    (first,) = history(home, "a")
    snapshot = home.snapshots / first.snapshot_id
    remove_tree(
        {"record": home.release_path("a"), "snapshot": snapshot}.get(lost, home.root / "refs")
    )
    assert jobs(ticker.tick()) == ["merge_a"]
    assert history(home, "a")[-1].snapshot_id == first.snapshot_id
    assert (snapshot / "manifest.json").is_file()
    assert jobs(ticker.tick()) == []


def test_a_long_error_is_cut_before_what_to_do_next() -> None:
    last = Attempt(0.0, f"{'a long story ' * 60}. Next: copy the file again", Fault.LASTING)
    said = reason_to_wait([last], 1.0, 1.0)
    assert said is not None
    assert len(said) < 500
    assert said.endswith("… Next: copy the file again")


def test_a_run_whose_process_was_killed_says_so(sensor: Sensor) -> None:
    ((request,), _) = sensor.tick()
    job = build_definitions(sensor.home).resolve_job_def(str(request.job_name))
    run = sensor.instance.create_run_for_job(job, tags=request.tags)
    sensor.instance.report_run_failed(run)
    _, said = sensor.tick(pause_s=1000)
    assert "the last: its process ended without a word: it was killed, or had no memory" in said
    assert "until one works" in said
