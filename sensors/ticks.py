"""What sensors share: how often they tick, what they tell, and how they wait for a lost disk."""

import errno
import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import dagster as dg

from mergepipe_pipeline.deploy.instance import is_refused, own_name
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resources import WAREHOUSE_TAG, MergePipe
from mergepipe_pipeline.sensors.runs import Ours
from mergepipe_pipeline.settings import SENSOR_INTERVAL
from mergepipe_pipeline.warehouse import Warehouse

#: For sensors that somebody waits for. Dagster looks every 5 s: with 5 here, a tick that began late
#: in one look would be skipped in the next.
SOON_S = 4
#: Lines of which a tick that asks for nothing tells: every one is stored.
MAX_LINES = 20
#: Why nothing is asked for that definitions are needed for.
LOADING = "its definitions are being loaded"
#: Places in the queue, the highest first. Merges, single arrivals and what a person starts have 0.
BURST_PRIORITY, NIGHTLY_PRIORITY = "-1", "-2"
#: The pools of our assets and jobs.
POOLS = ("disk_read", "disk_write")
#: Runs that tell which warehouse was here before.
_MOST_READ = 20


def interval_s(usual_s: int) -> int:
    """Seconds between the ticks of a sensor, as its setting says, or what is usual."""
    return SENSOR_INTERVAL.value() or usual_s


def standing_sensor(
    description: str, usual_s: int, jobs: Sequence[Any] | None = None
) -> Callable[[Callable[..., Any]], dg.SensorDefinition]:
    """A sensor of ours from a function, named as that and on from the start.

    One that asks for runs of `jobs` asks for nothing while the warehouse cannot be written: they
    would fail.
    """

    def decorate(tick: Callable[..., Any]) -> dg.SensorDefinition:
        sensor = dg.sensor(
            description=description,
            jobs=jobs,
            minimum_interval_seconds=interval_s(usual_s),
            default_status=dg.DefaultSensorStatus.RUNNING,
        )
        return sensor(tick if jobs is None else _while_writable(tick))

    return decorate


def asked(
    context: dg.SensorEvaluationContext,
    requests: Sequence[dg.RunRequest],
    lines: Sequence[str],
    nothing: str,
    **more: Any,
) -> dg.SensorResult:
    """What a tick gives: its runs, with all lines in its log, or else `nothing` as its reason."""
    if not requests:
        return dg.SensorResult(skip_reason=dg.SkipReason(nothing), **more)
    context.log.info(separated(lines))
    return dg.SensorResult(run_requests=list(requests), **more)


def separated(reasons: Sequence[str]) -> str:
    """Reasons of a tick, each on a line with a dot before it: the UI shows all in one line."""
    return "".join(reasons) if len(reasons) < 2 else "\n".join(f"• {r}" for r in reasons)


def _while_writable(tick: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(tick)
    def patient(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> Any:
        root = mergepipe.warehouse.root
        try:
            if not os.access(root, os.W_OK):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(root))
            return tick(context, mergepipe)
        except OSError as error:
            if not is_refused(error):
                raise
            why = f"{error.filename or root}: {error.strerror}"
        said = f"the warehouse cannot be written: {why}; all goes on once it can be"
        return dg.SensorResult(skip_reason=dg.SkipReason(said))

    return patient


def refuse_empty(ours: Ours, warehouse: Warehouse) -> None:
    """Raise MergePipeError if a warehouse of which Dagster knows experts holds nothing at all.

    It is made where it is not there, and so on the mount point of a disk that is gone.
    """
    folders = (warehouse.recipes, warehouse.inbox)
    if any(any(folder.iterdir()) for folder in folders) or warehouse.catalog.names():
        return
    known = _known(ours)
    if not known:
        return
    raise MergePipeError(
        "The warehouse is empty, though Dagster knows of its experts",
        where=str(warehouse.root),
        expected=f"a catalog with {known} experts",
        found="an empty catalog, no recipe, and nothing in the inbox",
        next_step="mount its disk again, and all goes on; if it is empty on purpose, put a "
        "checkpoint into its inbox",
    )


def _known(ours: Ours) -> int:
    """How many experts Dagster knows of the warehouse that the last runs here were of.

    One that is made on a mount point has an identity of its own.
    """
    known = 0
    for job in ("index_experts", "index_burst"):
        wanted = dg.RunsFilter(job_name=job, tags=ours.location)
        runs = ours.instance.get_runs(wanted, limit=_MOST_READ)
        for identity in {run.tags[WAREHOUSE_TAG] for run in runs if WAREHOUSE_TAG in run.tags}:
            experts = ours.instance.get_dynamic_partitions(own_name("experts", identity))
            known = max(known, len(experts))
    return known


def make_pools_known(instance: dg.DagsterInstance) -> None:
    """Give each pool the default limit of `dagster.yaml` if it has none yet.

    Dagster does so when a run that needs the pool waits in the queue, but only after it has listed
    the pools that it obeys in that look: a burst that is the first of an instance would start as
    many runs as there are places.
    """
    storage = instance.event_log_storage
    if instance.global_op_concurrency_default_limit is None:
        return
    known = {limit.name for limit in storage.get_pool_limits()}
    for pool in POOLS:
        if pool not in known:
            storage.initialize_concurrency_limit_to_default(pool)


def limit_pool(instance: dg.DagsterInstance, pool: str, most: int) -> None:
    """Let at most so many runs take a place of a pool at once."""
    storage = instance.event_log_storage
    if (pool, most) not in {(limit.name, limit.limit) for limit in storage.get_pool_limits()}:
        storage.set_concurrency_slots(pool, most)
