"""The verb `verify`: every byte of a snapshot is what was written."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.execution.lookup import snapshot_named
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.snapshots.checks import Verification, verify_with_progress
from mergepipe_pipeline.warehouse import Warehouse


def verify(warehouse: Warehouse, what: str, progress: Progress | None = None) -> Verification:
    """Re-hash every byte of a snapshot, given by id, unique prefix, ref, `REF@VERSION`, or folder.

    The folder may be one that `--out` wrote, wherever it lies.
    Raises CorruptionError naming the file and tensor that is wrong, NotFoundError for an unknown
    name.
    """
    snapshot = snapshot_named(warehouse, what)
    is_copy = Path(snapshot.path).parent != warehouse.snapshots
    return verify_with_progress(snapshot, progress, is_copy=is_copy)
