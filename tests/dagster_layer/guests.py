"""What code locations have on one instance: ours, another warehouse's, and a stranger's."""

from __future__ import annotations

import sys
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
from dagster import DagsterRunStatus as Status
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    TickData,
    TickStatus,
)
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.ticks import Ours
from mergepipe_pipeline.warehouse import Warehouse

#: What our location loads.
MODULE = "mergepipe_pipeline.definitions"
_TEAM = Path(__file__).with_name("team.py")
_LOAD = f"""load_from:
  - python_module: {{module_name: {MODULE}, location_name: mergepipe}}
  - python_file: {{relative_path: {_TEAM}, location_name: team}}
"""
_LONG_AGO = timedelta(days=40)


def repository_of(location: str, module: str = MODULE) -> RemoteRepositoryOrigin:
    """Where the runs and sensors of a code location come from."""
    target = LoadableTargetOrigin(executable_path=sys.executable, module_name=module)
    place = ManagedGrpcPythonEnvCodeLocationOrigin(target, location)
    return RemoteRepositoryOrigin(place, "__repository__")


def origins(job: str, location: str = "mergepipe", module: str = MODULE) -> dict[str, Any]:
    """What a run of a code location says of its origin."""
    code = RepositoryPythonOrigin(sys.executable, ModuleCodePointer(module, "defs"))
    return {
        "remote_job_origin": RemoteJobOrigin(repository_of(location, module), job),
        "job_code_origin": JobPythonOrigin(job, code),
    }


def ours_of(home: Warehouse, instance: dg.DagsterInstance, location: str | None = None) -> Ours:
    """What a warehouse may touch of an instance, from a code location or from none."""
    label = location and repository_of(location).get_label()
    return Ours(instance, MergePipe(home=str(home.root)).tags, label)


def made_long_ago(
    instance: dg.DagsterInstance,
    job: str,
    status: Status,
    location: str,
    tags: dict[str, str] | None = None,
) -> str:
    """A run of a code location that was made forty days ago, and no event of it; its id."""
    run_id, module = str(uuid.uuid4()), MODULE if location == "mergepipe" else "own_location"
    made = origins(job, location, module)
    run = dg.DagsterRun(job, run_id, status=status, tags=tags or {}, **made)
    instance.run_storage.add_historical_run(run, datetime.now(UTC) - _LONG_AGO)
    return run_id


@dataclass(frozen=True)
class Team:
    """What another team has on an instance, whose location may be loaded beside ours."""

    runs: dict[str, Status]
    sensor: InstigatorState

    @staticmethod
    def settle(instance: dg.DagsterInstance) -> Team:
        """Give the team a history, a run that is silent for long, partitions and an idle tick."""
        statuses = (Status.SUCCESS, Status.FAILURE, Status.STARTED)
        runs = {made_long_ago(instance, "train", s, "team"): s for s in statuses}
        instance.add_dynamic_partitions("experts", ["run-17", "run-18"])
        origin = RemoteInstigatorOrigin(repository_of("team"), "inbox_sensor")
        kind = InstigatorType.SENSOR
        state = InstigatorState(origin, kind, InstigatorStatus.RUNNING)
        instance.add_instigator_state(state)
        ids = state.instigator_origin_id, state.instigator_name, kind, TickStatus.SKIPPED
        eight_hours_ago = time.time() - 8 * 3600
        instance.create_tick(
            TickData(*ids, eight_hours_ago, run_ids=[], selector_id=state.selector_id)
        )
        return Team(runs, state)

    def lost(self, instance: dg.DagsterInstance) -> list[str]:
        """What of it somebody changed or deleted."""
        found = {r.run_id: r.status for r in instance.get_runs() if r.run_id in self.runs}
        ids = self.sensor.instigator_origin_id, self.sensor.selector_id
        return [
            *(f"run {s.value}" for run_id, s in self.runs.items() if found.get(run_id) is not s),
            *{"run-17", "run-18"}.difference(instance.get_dynamic_partitions("experts")),
            *([] if instance.get_ticks(*ids) else ["its tick"]),
        ]


def workspace_of_two(folder: Path) -> Path:
    """A file that loads our location and the team's."""
    path = folder / "workspace.yaml"
    path.write_text(_LOAD)
    return path
