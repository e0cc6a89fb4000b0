"""Watches the inbox: an expert that landed whole is indexed, a half-copied one waits."""

from collections.abc import Sequence

import dagster as dg

from mergepipe_pipeline.assets.experts import EXPERTS_TAG, expert_index, experts, index_burst
from mergepipe_pipeline.deploy.arrivals import ask
from mergepipe_pipeline.deploy.inbox import InboxEntry, Patience, scan_inbox
from mergepipe_pipeline.deploy.recorded import gone_inputs
from mergepipe_pipeline.deploy.standing import first_steps
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors import BURST_PRIORITY, MAX_LINES, SOON_S, interval_s
from mergepipe_pipeline.sensors.attempts import ACTIVE
from mergepipe_pipeline.sensors.outage import refuse_empty
from mergepipe_pipeline.sensors.pools import make_pools_known
from mergepipe_pipeline.text import in_one_line
from mergepipe_pipeline.warehouse import Warehouse

#: Runs that one tick asks for at most, and experts of one run: few land as one run each.
MAX_RUNS, MAX_EXPERTS = 8, 32

index_job = dg.define_asset_job(
    "index_experts",
    selection=[expert_index],
    description="Indexes one checkpoint of the inbox; inbox_sensor starts it when it is whole.",
)


@dg.sensor(
    description=(
        "Starts the index of every checkpoint that is new or changed, and whole, of the inbox and "
        "of those that recipes name elsewhere; its ticks say what waits and why."
    ),
    jobs=[index_job, index_burst],
    minimum_interval_seconds=interval_s(SOON_S),
    default_status=dg.DefaultSensorStatus.RUNNING,
)
def inbox_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
    """Requests the index of every watched checkpoint that the catalog does not know as it is.

    Folders whose files are missing, short, half replaced or younger than the quiet period wait, and
    so does one whose run failed, longer each time. Nothing is asked for while a run indexes it.
    """
    warehouse = mergepipe.warehouse
    patience = Patience(mergepipe.inbox_quiet_s, mergepipe.inbox_retry_s, mergepipe.packs)
    landed = scan_inbox(warehouse, patience, under_way(context.instance), MAX_RUNS * MAX_EXPERTS)
    ready = [x for x in landed if x.is_ready]
    known = set(context.instance.get_dynamic_partitions(experts.name or ""))
    new = [x.name for x in landed if (x.is_ready or x.is_indexed) and x.name not in known]
    if known and not landed:
        refuse_empty(context.instance, warehouse)
    gone = gone_inputs(warehouse, known - {x.name for x in landed})
    left = f"left the inbox: {', '.join(gone)}; " if gone else ""
    said = f"{len(landed)} experts, {len(ready)} to index; {left}waiting: {_waiting(landed)}"
    if not landed and not gone:
        said = first_steps(warehouse) or said
    if ready:  # else Dagster shows it as the reason of the tick
        make_pools_known(context.instance)
        context.log.info(said)
    return dg.SensorResult(
        run_requests=_requests(warehouse, ready),
        dynamic_partitions_requests=[
            *([experts.build_add_request(new)] if new else []),
            *([experts.build_delete_request(gone)] if gone else []),
        ],
        asset_events=[
            dg.AssetObservation(expert_index.key, partition=name, description="It left the inbox.")
            for name in gone
        ],
        skip_reason=None if ready else dg.SkipReason(said),
    )


def _waiting(landed: Sequence[InboxEntry]) -> str:
    """What waits and why: the first of them, since every tick stores it."""
    lines = [in_one_line(f"{x.name}: {x.waiting}") for x in landed if x.waiting]
    more = len(lines) - MAX_LINES
    if more > 0:
        lines[MAX_LINES:] = [f"{more} more"]
    return "; waiting: ".join(lines) or "none"


def under_way(instance: dg.DagsterInstance) -> set[str]:
    """The experts that a run indexes or will index, whoever asked for it."""
    names: set[str] = set()
    for job in (index_job.name, index_burst.name):
        for run in instance.get_runs(dg.RunsFilter(job_name=job, statuses=ACTIVE)):
            names.update(run.tags.get(EXPERTS_TAG, "").split(","))
            names.add(run.tags.get("dagster/partition", ""))
    return names


def _requests(warehouse: Warehouse, ready: Sequence[InboxEntry]) -> list[dg.RunRequest]:
    """One run for each expert while they are few, else runs of several.

    One over which a run was killed has a run of its own, lest it end others with it for ever.
    """
    alone = [x for x in ready if x.was_killed][:MAX_RUNS]
    others = [x for x in ready if not x.was_killed]
    size = min(MAX_EXPERTS, -(-len(others) // MAX_RUNS)) or 1
    parts = [others[i : i + size] for i in range(0, len(others), size)]
    return [_request(warehouse, part) for part in (*([x] for x in alone), *parts)]


def _request(warehouse: Warehouse, some: Sequence[InboxEntry]) -> dg.RunRequest:
    names = [x.name for x in some]
    keys = [ask(warehouse, x.name, x.token) for x in some]
    tags = {EXPERTS_TAG: ",".join(names)}
    if len(some) == 1:
        return dg.RunRequest(keys[0], job_name=index_job.name, partition_key=names[0], tags=tags)
    config = dg.RunConfig({"index_several": {"config": {"experts": names}}})
    # A burst lets merges and single arrivals pass.
    tags["dagster/priority"] = BURST_PRIORITY
    return dg.RunRequest(keys[0], job_name=index_burst.name, run_config=config, tags=tags)
