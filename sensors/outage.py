"""Tells of a warehouse whose disk is gone, unlike one that holds nothing yet, or is read-only."""

import errno
import os
from collections.abc import Callable
from functools import wraps

import dagster as dg
from dagster._core.storage.tags import REPOSITORY_LABEL_TAG

from mergepipe_pipeline.deploy.instance import is_refused, own_name
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resources import WAREHOUSE_TAG, MergePipe
from mergepipe_pipeline.sensors.ours import Ours
from mergepipe_pipeline.warehouse import Warehouse

_Tick = Callable[[dg.SensorEvaluationContext, MergePipe], dg.SensorResult]
#: Runs that tell which warehouse was here before.
_MOST_READ = 20


def while_writable(tick: _Tick) -> _Tick:
    """Let a sensor ask for nothing while the warehouse cannot be written: its runs would fail."""

    @wraps(tick)
    def patient(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
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
    wanted = {} if ours.label is None else {REPOSITORY_LABEL_TAG: ours.label}
    known = 0
    for job in ("index_experts", "index_burst"):
        runs = ours.instance.get_runs(dg.RunsFilter(job_name=job, tags=wanted), limit=_MOST_READ)
        for identity in {run.tags[WAREHOUSE_TAG] for run in runs if WAREHOUSE_TAG in run.tags}:
            experts = ours.instance.get_dynamic_partitions(own_name("experts", identity))
            known = max(known, len(experts))
    return known
