"""What is ours of a Dagster instance that others use, too: runs, and the ticks of our sensors.

Every sensor that asks for runs asks here. A run is ours if it carries the identity of our warehouse
and no other code location made it: a copy of a warehouse has the identity of the original. A run
without any, which waits in the queue or is of an earlier version, is ours if our location made it
and loads nothing but this package.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import dagster as dg
from dagster import DagsterRunStatus as Status
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.scheduler.instigation import InstigatorState
from dagster._core.storage.tags import REPOSITORY_LABEL_TAG

from mergepipe_pipeline.resources import WAREHOUSE_TAG, MergePipe

ACTIVE = [Status.QUEUED, Status.NOT_STARTED, Status.STARTING, Status.STARTED, Status.CANCELING]
#: The module that loads nothing but ours.
_MODULE = "mergepipe_pipeline.definitions"
#: All our sensors, whose ticks are ours.
SENSORS = frozenset(
    f"{name}_sensor"
    for name in (
        *("inbox", "orphans", "recipe", "reload", "retention"),
        *("failure", "stalled", "bisect", "search"),
    )
)


@dataclass(frozen=True)
class Ours:
    """What one code location may touch of an instance.

    `tags` are those of our runs; `label` names the location as Dagster's storage does, None where
    nobody says it, as to a schedule or outside of a location.
    """

    instance: dg.DagsterInstance
    tags: Mapping[str, str]
    label: str | None = None

    @staticmethod
    def of(
        context: dg.SensorEvaluationContext | dg.ScheduleEvaluationContext, mergepipe: MergePipe
    ) -> "Ours":
        """What is ours for a tick."""
        label = None
        if isinstance(context, dg.SensorEvaluationContext) and context.code_location_origin:
            place = context.code_location_origin.location_name
            label = f"{context.repository_name}@{place}"
        return Ours(context.instance, mergepipe.tags, label)

    def has(self, run: dg.DagsterRun) -> bool:
        """Whether a run is ours."""
        made = run.remote_job_origin
        if made and self.label not in (None, made.repository_origin.get_label()):
            return False
        if WAREHOUSE_TAG in run.tags:
            return self.tags.items() <= run.tags.items()
        return made is not None and _loads_ours_alone(run)

    def runs(
        self, statuses: Sequence[Status], tags: Mapping[str, str] | None = None
    ) -> list[dg.DagsterRun]:
        """Our runs of these statuses with these tags, the newest first."""
        wanted = dg.RunsFilter(statuses=list(statuses), tags=dict(tags or {}))
        return [run for run in self.instance.get_runs(wanted) if self.has(run)]

    def runs_before(self, statuses: Sequence[Status], created_s: float) -> list[dg.DagsterRun]:
        """Our runs of these statuses that were made before a time in seconds, the oldest first."""
        # Others may keep very many: storage looks for what our location made, or our warehouse.
        tags = self.tags if self.label is None else {REPOSITORY_LABEL_TAG: self.label}
        before = datetime.fromtimestamp(created_s).astimezone()
        wanted = dg.RunsFilter(statuses=list(statuses), tags=dict(tags), created_before=before)
        return [run for run in self.instance.get_runs(wanted, ascending=True) if self.has(run)]

    def has_sensor(self, state: InstigatorState) -> bool:
        """Whether a state that the instance keeps is of a sensor of ours."""
        return (
            state.instigator_name in SENSORS
            and state.origin.repository_origin.get_label() == self.label
        )


def _loads_ours_alone(run: dg.DagsterRun) -> bool:
    """Whether the location that made a run loads only our definitions."""
    origin = run.job_code_origin
    pointer = origin.repository_origin.code_pointer if origin else None
    return isinstance(pointer, ModuleCodePointer) and pointer.module == _MODULE
