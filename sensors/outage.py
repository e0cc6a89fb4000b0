"""Tells a warehouse whose disk is gone from one that holds nothing yet."""

import dagster as dg

from mergepipe_pipeline.assets.experts import experts
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.warehouse import Warehouse


def refuse_empty(instance: dg.DagsterInstance, warehouse: Warehouse) -> None:
    """Raise MergePipeError if a warehouse of which Dagster knows experts holds nothing at all.

    It is made where it is not there, and so on the mount point of a disk that is gone.
    """
    folders = (warehouse.recipes, warehouse.inbox)
    if any(any(folder.iterdir()) for folder in folders) or warehouse.catalog.names():
        return
    known = len(instance.get_dynamic_partitions(experts.name or ""))
    if not known:
        return
    raise MergePipeError(
        "The warehouse is empty, though Dagster knows of its experts",
        where=str(warehouse.root),
        expected=f"a catalog with {known} experts",
        found="an empty catalog, no recipe, and nothing in the inbox",
        next_step="mount its disk again, and all goes on; if it was emptied on purpose, delete the "
        "partitions of `experts` in Dagster",
    )
