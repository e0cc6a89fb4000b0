"""Makes a staged snapshot exist: one rename. Committing the same result twice succeeds."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.snapshots.load import load_snapshot
from mergepipe_pipeline.snapshots.verify import verify_snapshot
from mergepipe_pipeline.spec.snapshot import Snapshot
from mergepipe_pipeline.storage.atomic import publish_dir


def commit_snapshot(staged: Path, snapshots: Path) -> Snapshot:
    """The snapshot of a staged folder, which is named by its id.

    If the snapshot exists already, it is returned: CorruptionError if someone damaged it since.
    Publishing verifies every byte.
    """
    final = snapshots / staged.name
    if final.exists() or not publish_dir(staged, final):
        verify_snapshot(final, only_touched=True)
    return load_snapshot(snapshots, staged.name)
