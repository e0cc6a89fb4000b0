"""Says of each checkpoint that is watched whether recipes can use it: the check `usable`."""

import json
import time
import uuid
from collections.abc import Collection, Sequence
from typing import Any

import dagster as dg
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData as Target,
)

from mergepipe_pipeline.assets.experts import EXPERT_INDEX, USABLE
from mergepipe_pipeline.assets.metadata import description
from mergepipe_pipeline.deploy.inbox import InboxEntry

_EVALUATED = dg.DagsterEventType.ASSET_CHECK_EVALUATION.value


def report_usable(
    instance: dg.DagsterInstance,
    landed: Sequence[InboxEntry],
    busy: Collection[str],
    cursor: str | None,
) -> str:
    """Report the check of each checkpoint that is usable since the last look, or not any more.

    Of those that are `busy` nobody can say. Returns the next look's cursor: what is wrong by name.
    """
    before: dict[str, list[str]] = json.loads(cursor or "{}")
    after: dict[str, list[str]] = {}
    for x in landed:
        last = before.get(x.name)
        if x.name in busy or not (x.fault or x.is_indexed):
            now = last
        else:
            # A fault of other files is told anew: they have an event of the index of their own.
            now = [x.token, x.fault] if x.fault else None
        if now:
            after[x.name] = now
        if now != last:
            _report(instance, x.name, x.fault)
    return json.dumps(after)


def _report(instance: dg.DagsterInstance, name: str, fault: str | None) -> None:
    """Report the check of one partition.

    Dagster's own report without a run is one of each partition, for ever: its table has one row for
    each partition and run. So this one has the id of a run that there never was.
    """
    said = description(fault or "It is whole, and indexed as it is.")
    instance.report_runless_asset_event(
        dg.AssetObservation(EXPERT_INDEX, partition=name, description=said)
    )
    checked = dg.AssetCheckEvaluation(
        EXPERT_INDEX,
        USABLE,
        passed=fault is None,
        partition=name,
        description=said,
        target_materialization_data=_target(instance, name),
    )
    event = dg.DagsterEvent(_EVALUATED, job_name="", event_specific_data=checked)
    entry: Any = dg.EventLogEntry  # Dagster gives it no types
    made = entry(None, "info", "", str(uuid.uuid4()), time.time(), dagster_event=event)
    storage: Any = instance.event_log_storage
    storage.store_asset_check_event(made, storage.get_maximum_record_id())


def _target(instance: dg.DagsterInstance, name: str) -> Target | None:
    """The last event of the index: of an earlier one the UI does not show the check."""
    wanted = dg.AssetRecordsFilter(EXPERT_INDEX, asset_partitions=[name])
    for record in instance.fetch_materializations(wanted, limit=1).records:
        made = record.event_log_entry
        return Target(storage_id=record.storage_id, run_id=made.run_id, timestamp=made.timestamp)
    return None
