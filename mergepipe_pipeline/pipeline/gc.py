"""The verb `gc`: free the space of what no snapshot needs."""

from __future__ import annotations

from mergepipe_pipeline.pipeline.commit import object_store
from mergepipe_pipeline.snapshots.gc import Collected
from mergepipe_pipeline.snapshots.gc import collect as run
from mergepipe_pipeline.warehouse import Warehouse


def collect(home: Warehouse, *, older_than_s: float = 3600.0, dry_run: bool = False) -> Collected:
    """Remove unreferenced objects, actions and staging older than `older_than_s` seconds."""
    written = (home.catalog, home.plans, home.objects, home.actions, home.refs, home.releases)
    return run(
        object_store(home),
        home.snapshots,
        home.staging,
        written,
        older_than_s=older_than_s,
        dry_run=dry_run,
    )
