"""The verb `verify`: every byte of a snapshot is what was written."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.execution.lookup import snapshot_named
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.checks import Verification, verify_snapshot
from mergepipe_pipeline.warehouse import Warehouse


def verify(warehouse: Warehouse, what: str, progress: Progress | None = None) -> Verification:
    """Re-hash every byte of a snapshot, given by id, unique prefix, ref, `REF@VERSION`, or folder.

    The folder may be one that `--out` wrote, wherever it lies.
    Raises CorruptionError naming the file and tensor that is wrong, NotFoundError for an unknown
    name.
    """
    snapshot = snapshot_named(warehouse, what)
    folder = Path(snapshot.path)
    is_copy = folder.parent != warehouse.snapshots
    total = sum(s.nbytes for s in snapshot.manifest.shards)
    with (progress or Silent()).task(f"verify {snapshot.snapshot_id[:12]}", total) as advance:
        return verify_snapshot(folder, advance, is_copy=is_copy)
