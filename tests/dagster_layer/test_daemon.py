"""With a real daemon: a burst, a bad expert, and processes that end though nobody asked them to."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import sys
import threading
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.assets.experts import EXPERTS_TAG
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop
from tests.dagster_layer.daemon import Daemon, asks_again, most_at_once, running_daemon
from tests.dagster_layer.guests import Team, made_long_ago, workspace_of_two
from tests.support.processes import wait_for

pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore::Warning")]
_RETRY_S = 1


def test_a_database_that_is_malformed_for_a_moment_is_asked_again_and_one_that_stays_so_is_told(
    tmp_path: Path,
) -> None:
    path = tmp_path / "runs.db"

    @asks_again
    def look() -> int:
        with closing(sqlite3.connect(path)) as database:
            return int(database.execute("SELECT n FROM runs").fetchone()[0])

    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE runs AS SELECT 7 AS n")
    whole = path.read_bytes()
    malformed = whole[:4096] + b"\xff" * (len(whole) - 4096)
    path.write_bytes(malformed)
    mended = threading.Timer(0.2, path.write_bytes, [whole])
    mended.start()
    assert look() == 7
    mended.join()
    path.write_bytes(malformed)
    with pytest.raises(sqlite3.DatabaseError, match="malformed"):
        look()


def test_a_cancelled_run_loses_no_expert_and_a_power_loss_leaves_no_run_started(
    home: Warehouse, drop: Drop
) -> None:
    drop("base")
    daemon = Daemon(home, environment={"MERGEPIPE_INBOX_RETRY_S": "2"})
    daemon.workspace = workspace_of_two(home.root.parent)
    with daemon.instance as instance:
        team = Team.settle(instance)
        old = made_long_ago(instance, "collect", Status.SUCCESS, "mergepipe")
    try:
        daemon.start()
        (first,) = daemon.wait_for(
            "a queued run", lambda: daemon.runs("index_experts", Status.QUEUED), every_s=0.05
        )
        with daemon.instance as instance:
            assert instance.run_coordinator.cancel_run(first.run_id)
        (lost,) = daemon.wait_for(
            "a second run, in its step", lambda: daemon.begun("index_experts"), every_s=0.05
        )
        daemon.kill()
        assert [r.run_id for r in daemon.runs("index_experts", Status.STARTED)] == [lost]
        daemon.start()
        daemon.wait_for(
            "its end", lambda: not daemon.runs("index_experts", Status.STARTED), seconds=60
        )
        daemon.wait_for("a third run", lambda: daemon.partitions(Status.SUCCESS) == ["base"])
        *lost_ones, last = [run.status for run in daemon.runs("index_experts")]
        assert last is Status.SUCCESS
        # The queue may let the first run go in the moment in which it is cancelled.
        assert lost_ones[-1] is Status.FAILURE
        assert lost_ones[:-1] in ([], [Status.CANCELED], [Status.FAILURE])
        another_team_has_what_it_had_and_our_old_run_is_gone(daemon, team, old)
    finally:
        daemon.kill()


def another_team_has_what_it_had_and_our_old_run_is_gone(
    daemon: Daemon, team: Team, old: str
) -> None:
    daemon.wait_for("the team's training", lambda: daemon.runs("train", Status.SUCCESS)[1:])
    with daemon.instance as instance:
        assert team.lost(instance) == []
        assert instance.get_run_by_id(old) is None


def test_many_that_land_at_once_obey_their_pool_and_one_that_fails_is_given_up(
    home: Warehouse, family: Path, drop: Drop
) -> None:
    names = [f"expert_{i:02d}" for i in range(8)]
    for name in names:
        drop(name, "expert_00")
    shutil.copytree(family / "expert_00", home.inbox / "headless")
    (home.inbox / "headless" / "model.safetensors").write_bytes(b"no header")
    drop("refused", "expert_00")
    (home.catalog_dir / "names").mkdir(parents=True, exist_ok=True)
    (home.catalog_dir / "names" / "refused").write_bytes(b"where its versions would be")
    with running_daemon(home, MERGEPIPE_INBOX_RETRY_S=str(_RETRY_S)) as daemon:
        several_are_indexed_in_one_run_and_no_more_runs_at_once_than_their_pool_takes(daemon, names)
        what_fails_is_tried_three_times_with_growing_pauses_and_then_quarantined(daemon)
        assert len(daemon.processes()) >= 2
    assert daemon.processes() == []


def several_are_indexed_in_one_run_and_no_more_runs_at_once_than_their_pool_takes(
    daemon: Daemon, names: list[str]
) -> None:
    daemon.wait_for("eight experts", lambda: daemon.indexed() == set(names), seconds=300)
    daemon.wait_for("the runs' ends", lambda: len(daemon.runs("index_burst", Status.SUCCESS)) == 4)
    (known,) = {
        said.partition("waiting: headless: ")[2].partition(" Where:")[0]
        for said in daemon.skips("inbox_sensor")
        if "headless" in said
    }
    assert known.startswith("A safetensors header")
    with daemon.instance as instance:
        # On an instance that is new: its first look at the queue obeys pools, too.
        assert most_at_once(instance)["disk_read"] <= 2


def what_fails_is_tried_three_times_with_growing_pauses_and_then_quarantined(
    daemon: Daemon,
) -> None:
    daemon.wait_for(
        "a tick that says so",
        lambda: "refused: given up after 3 failures" in daemon.skips("inbox_sensor")[0],
        seconds=300,
    )
    with daemon.instance as instance:
        records = instance.get_run_records(ascending=True)
    asked = [r for r in records if "refused" in r.dagster_run.tags[EXPERTS_TAG].split(",")]
    assert [r.dagster_run.status for r in asked] == [Status.FAILURE] * 3
    pauses = [(b.create_timestamp - a.create_timestamp).total_seconds() for a, b in pairwise(asked)]
    assert pauses[0] >= _RETRY_S
    assert pauses[1] >= 4 * _RETRY_S
    # Who asks again is the sensor: Dagster itself retries none of them.
    assert not any(r.dagster_run.parent_run_id for r in records)


def test_a_merge_that_a_person_terminates_ends_within_its_step_and_no_step_begins_again(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    begun = home.root / "begun"
    evaluator = home.root / "slow.py"
    evaluator.write_text(
        f"import pathlib as p, time\np.Path({str(begun)!r}).touch()\ntime.sleep(300)\n"
    )
    path = home.recipe_path("n")
    path.write_text(f"{path.read_text()}\nevaluate: {{command: [{sys.executable}, {evaluator}]}}\n")
    with running_daemon(home, MERGEPIPE_RETRY_S="600") as daemon:
        daemon.wait_for("the evaluation", begun.exists, seconds=120)
        (run,) = daemon.runs("merge_n", Status.STARTED)
        with daemon.instance as instance:
            assert instance.run_launcher.terminate(run.run_id)
        daemon.wait_for("its end", lambda: daemon.runs("merge_n", Status.CANCELED), seconds=60)
        with daemon.instance as instance:
            again = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_RESTARTED)
        assert not again


def test_sigterm_ends_a_ui_that_a_script_runs_in_the_background_and_its_children(
    home: Warehouse,
) -> None:
    pytest.importorskip("dagster_webserver")
    daemon = Daemon(home, ui="mergepipe", sigint=signal.SIG_IGN)
    daemon.runs()
    try:
        daemon.start()
        daemon.wait_for("a look at recipes", lambda: daemon.skips("recipe_sensor"))
        (first,) = [p for p in daemon.processes() if os.getsid(p) == p]
        os.kill(first, signal.SIGTERM)
        wait_for("the end of all processes", lambda: not daemon.processes())
    finally:
        daemon.kill()
