"""Watches the inbox: an expert that landed whole is indexed, a half-copied one waits."""

import json
import time
import uuid
from collections.abc import Collection, Sequence
from typing import Any

import dagster as dg
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData as Target,
)

from mergepipe_pipeline.assets.experts import EXPERTS_TAG, USABLE, build_burst, index_key
from mergepipe_pipeline.assets.metadata import description
from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.assets.running import READ_POOL
from mergepipe_pipeline.deploy.arrivals import ask
from mergepipe_pipeline.deploy.inbox import InboxEntry, Patience, scan_inbox
from mergepipe_pipeline.deploy.recorded import gone_inputs
from mergepipe_pipeline.deploy.runs import link_steps
from mergepipe_pipeline.deploy.standing import first_steps
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.ticks import (
    ACTIVE,
    BURST_PRIORITY,
    MAX_LINES,
    SOON_S,
    Ours,
    make_pool_known,
    refuse_empty,
    standing_sensor,
)
from mergepipe_pipeline.settings import SHARDS
from mergepipe_pipeline.text import in_one_line
from mergepipe_pipeline.warehouse import Warehouse

#: Runs that one tick asks for at most, and experts of one run: few land as one run each.
MAX_RUNS, MAX_EXPERTS = 8, 32

#: The jobs that the sensor starts: of one expert, and of several.
ONE, SEVERAL = "index_experts", "index_burst"


def build_index_jobs(place: Place = ALONE) -> list[Any]:
    """These jobs."""
    sensor = place.name("inbox_sensor")
    one = dg.define_asset_job(
        place.name(ONE),
        selection=dg.AssetSelection.assets(index_key(place)).without_checks(),
        description=f"Indexes one checkpoint of the inbox; {sensor} starts it when it is whole.",
        tags=place.tags,
    )
    return [one, build_burst(SHARDS.value(), place)]


def build_inbox_sensor(
    experts: dg.DynamicPartitionsDefinition,
    jobs: Sequence[Any] | None = None,
    place: Place = ALONE,
) -> dg.SensorDefinition:
    """The sensor over all that lands; `experts` are the partitions of what its `jobs` make."""

    @standing_sensor(
        "Starts the index of every checkpoint that is new or changed, and whole, of the inbox and "
        "of those that recipes name elsewhere; its ticks say what waits and why.",
        SOON_S,
        jobs or build_index_jobs(place),
        place,
    )
    def inbox_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
        """Requests the index of every watched checkpoint that the catalog does not know as it is.

        Folders whose files are missing, short, half replaced or younger than the quiet period wait,
        and so does one whose run failed, longer each time. Nothing is asked for while a run indexes
        it.
        """
        return _tick(context, mergepipe, experts, place)

    return inbox_sensor


def _tick(
    context: dg.SensorEvaluationContext,
    mergepipe: MergePipe,
    experts: dg.DynamicPartitionsDefinition,
    place: Place,
) -> dg.SensorResult:
    ours, warehouse = Ours.of(context, mergepipe, place), mergepipe.warehouse
    instance = ours.instance
    patience = Patience(mergepipe.inbox_quiet_s, mergepipe.inbox_retry_s, mergepipe.packs)
    busy = under_way(ours)
    link_steps(warehouse)
    landed = scan_inbox(warehouse, patience, busy, MAX_RUNS * MAX_EXPERTS)
    ready = [x for x in landed if x.is_ready]
    known = set(instance.get_dynamic_partitions(experts.name or ""))
    shown = [x.name for x in landed if x.is_ready or x.is_indexed or x.fault]
    new = [name for name in shown if name not in known]
    if not landed:
        refuse_empty(ours, warehouse)
    gone = gone_inputs(warehouse, known - {x.name for x in landed})
    left = f"left the inbox: {', '.join(gone)}; " if gone else ""
    said = f"{len(landed)} experts, {len(ready)} to index; {left}waiting: {_waiting(landed)}"
    if not landed and not gone:
        said = first_steps(warehouse) or said
    if ready:  # else Dagster shows it as the reason of the tick
        make_pool_known(instance, READ_POOL)
        context.log.info(said)
    return dg.SensorResult(
        run_requests=[_request(warehouse, part, ours) for part in _parts(ready)],
        dynamic_partitions_requests=[
            *([experts.build_add_request(new)] if new else []),
            *([experts.build_delete_request(gone)] if gone else []),
        ],
        cursor=report_usable(ours, landed, busy, context.cursor),
        asset_events=[
            dg.AssetObservation(index_key(place), partition=name, description="It left the inbox.")
            for name in gone
        ],
        skip_reason=None if ready else dg.SkipReason(said),
    )


def _waiting(landed: Sequence[InboxEntry]) -> str:
    lines = [in_one_line(f"{x.name}: {x.waiting}") for x in landed if x.waiting]
    more = len(lines) - MAX_LINES
    if more > 0:
        lines[MAX_LINES:] = [f"{more} more"]
    return "; waiting: ".join(lines) or "none"


def under_way(ours: Ours) -> set[str]:
    """The experts that a run indexes or will index, whoever asked for it."""
    names: set[str] = set()
    for run in ours.runs(ACTIVE):
        if run.job_name in map(ours.place.name, (ONE, SEVERAL)):
            names.update(run.tags.get(EXPERTS_TAG, "").split(","))
            names.add(run.tags.get("dagster/partition", ""))
    return names


def _parts(ready: Sequence[InboxEntry]) -> list[Sequence[InboxEntry]]:
    """What each run indexes: one expert while they are few, else several.

    One over which a run was killed has a run of its own, lest it end others with it for ever.
    """
    alone = [x for x in ready if x.was_killed][:MAX_RUNS]
    others = [x for x in ready if not x.was_killed]
    size = min(MAX_EXPERTS, -(-len(others) // MAX_RUNS)) or 1
    parts = [others[i : i + size] for i in range(0, len(others), size)]
    return [*([x] for x in alone), *parts]


def _request(warehouse: Warehouse, some: Sequence[InboxEntry], ours: Ours) -> dg.RunRequest:
    names = [x.name for x in some]
    keys = [ask(warehouse, x.name, x.token) for x in some]
    tags = {**ours.tags, EXPERTS_TAG: ",".join(names)}
    if len(some) == 1:
        one = ours.place.name(ONE)
        return dg.RunRequest(keys[0], job_name=one, partition_key=names[0], tags=tags)
    config = dg.RunConfig({ours.place.name("index_several"): {"config": {"experts": names}}})
    # A burst lets merges and single arrivals pass.
    tags["dagster/priority"] = BURST_PRIORITY
    return dg.RunRequest(keys[0], job_name=ours.place.name(SEVERAL), run_config=config, tags=tags)


_EVALUATED = dg.DagsterEventType.ASSET_CHECK_EVALUATION.value


def report_usable(
    ours: Ours,
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
            _report(ours.instance, index_key(ours.place), x.name, x.fault)
    return json.dumps(after)


def _report(instance: dg.DagsterInstance, key: dg.AssetKey, name: str, fault: str | None) -> None:
    """Report the check of one partition.

    Dagster's own report without a run is one of each partition, for ever: its table has one row for
    each partition and run. So this one has the id of a run that there never was.
    """
    said = description(fault or "It is whole, and indexed as it is.")
    instance.report_runless_asset_event(dg.AssetObservation(key, partition=name, description=said))
    checked = dg.AssetCheckEvaluation(
        key,
        USABLE,
        passed=fault is None,
        partition=name,
        description=said,
        target_materialization_data=_target(instance, key, name),
    )
    event = dg.DagsterEvent(_EVALUATED, job_name="", event_specific_data=checked)
    entry: Any = dg.EventLogEntry  # Dagster gives it no types
    made = entry(None, "info", "", str(uuid.uuid4()), time.time(), dagster_event=event)
    storage: Any = instance.event_log_storage
    storage.store_asset_check_event(made, storage.get_maximum_record_id())


def _target(instance: dg.DagsterInstance, key: dg.AssetKey, name: str) -> Target | None:
    """The last event of the index: of an earlier one the UI does not show the check."""
    wanted = dg.AssetRecordsFilter(key, asset_partitions=[name])
    for record in instance.fetch_materializations(wanted, limit=1).records:
        made = record.event_log_entry
        return Target(storage_id=record.storage_id, run_id=made.run_id, timestamp=made.timestamp)
    return None
