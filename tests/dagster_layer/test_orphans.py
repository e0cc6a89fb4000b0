"""Which runs of a guest are taken for dead, by the process that executed them."""

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status
from dagster._core.events import EngineEventData

from mergepipe_pipeline.assets.place import Place
from mergepipe_pipeline.deploy.instance import identity_of
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.housekeeping import (
    GUEST_SILENCE_S,
    SILENCE_S,
    build_orphans_sensor,
    is_orphan,
)
from mergepipe_pipeline.warehouse import Warehouse

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
_NO_QUEUE = {
    "run_coordinator": {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"}
}


def run_of(
    instance: dg.DagsterInstance,
    silent_s: float,
    pid: int | None,
    status: Status = Status.STARTED,
    tags: dict[str, str] | None = None,
) -> dg.DagsterRun:
    """A run that has been silent for so long, of a process if one was started for it."""
    then = datetime.now(UTC) - timedelta(seconds=silent_s)
    run = dg.DagsterRun("merge", status=status, tags=tags)
    instance.run_storage.add_historical_run(run, then)
    if pid is not None:
        event = dg.DagsterEvent(
            dg.DagsterEventType.ENGINE_EVENT.value,
            "merge",
            message=f"Started process for run (pid: {pid}).",
            event_specific_data=EngineEventData.in_process(pid),
        )
        instance.report_dagster_event(event, run.run_id, timestamp=then.timestamp())
    return run


@pytest.mark.parametrize("queue", [True, False], ids=["queue", "no queue"])
def test_a_guests_run_is_dead_once_its_process_is_gone_where_the_daemon_starts_all_here(
    home: Warehouse, tmp_path: Path, queue: bool
) -> None:
    mergepipe, place = MergePipe(home=str(home.root)), Place(identity=identity_of(home))
    settings = None if queue else _NO_QUEUE
    with (
        dg.DagsterInstance.local_temp(str(tmp_path), settings) as instance,
        subprocess.Popen(["sleep", "60"]) as worker,
    ):

        def is_dead(silent_s: float, pid: int | None, status: Status = Status.STARTED) -> bool:
            return is_orphan(mergepipe, instance, run_of(instance, silent_s, pid, status), place)

        soon, late = SILENCE_S / 2, SILENCE_S * 2
        assert [is_dead(s, worker.pid) for s in (0.0, soon)] == [False, False]
        assert is_dead(late, worker.pid) is queue  # its number was another one's then
        worker.kill()
        assert [is_dead(s, worker.pid) for s in (soon, late)] == [False, queue]
        worker.wait()
        assert [is_dead(s, worker.pid) for s in (soon, late)] == [False, queue]
        assert [is_dead(s, None, Status.NOT_STARTED) for s in (soon, late)] == [False, queue]
        assert [is_dead(s, None) for s in (late, 2 * GUEST_SILENCE_S)] == [False, True]
        (
            home.leases_dir / f"run-{(run := run_of(instance, soon, worker.pid)).run_id}-x.json"
        ).touch()
        assert is_orphan(mergepipe, instance, run, place) is queue


def test_a_guests_run_that_was_just_starting_when_all_was_killed_ends(
    home: Warehouse, tmp_path: Path
) -> None:
    mergepipe = MergePipe(home=str(home.root))
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        starting = [
            run_of(instance, silent_s, pid, Status.STARTING, mergepipe.tags)
            for pid in (gone.pid, None)
            for silent_s in (SILENCE_S / 2, 2 * SILENCE_S)
        ]
        with dg.build_sensor_context(instance, resources={"mergepipe": mergepipe}) as tick:
            build_orphans_sensor(Place(identity=identity_of(home)))(tick)
        left = [instance.get_run_by_id(run.run_id) for run in starting]
        assert [run.status for run in left if run] == 2 * [Status.STARTING, Status.FAILURE]
