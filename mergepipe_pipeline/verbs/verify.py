"""The verb `verify`: every byte of a snapshot is what was written."""

from __future__ import annotations

from mergepipe_pipeline.execution.lookup import snapshot_of
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.checks import Verification, verify_snapshot
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.warehouse import Warehouse


def verify(warehouse: Warehouse, what: str, progress: Progress | None = None) -> Verification:
    """Re-hash every byte of a snapshot, given by id, unique prefix, ref, or `REF@VERSION`.

    Raises CorruptionError naming the file and tensor that is wrong, NotFoundError for an unknown
    name.
    """
    snapshot_id = snapshot_of(warehouse, what)
    manifest = load_snapshot(warehouse.snapshots, snapshot_id).manifest
    total = sum(s.nbytes for s in manifest.shards)
    with (progress or Silent()).task(f"verify {snapshot_id[:12]}", total) as advance:
        return verify_snapshot(warehouse.snapshots / snapshot_id, advance)
