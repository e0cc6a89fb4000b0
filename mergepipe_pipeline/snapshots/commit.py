"""Makes a staged snapshot exist: one rename. Committing the same result twice succeeds."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.snapshots.checks import verify_shard, verify_snapshot
from mergepipe_pipeline.snapshots.find import load_snapshot, read_manifest
from mergepipe_pipeline.spec.snapshot import Snapshot
from mergepipe_pipeline.storage.atomic import publish_dir, replace_dir


def commit_snapshot(staged: Path, snapshots: Path, aside: Path | None = None) -> Snapshot:
    """The snapshot of a staged folder, which is named by its id.

    If the snapshot exists already, it is returned: CorruptionError if someone damaged it since.
    With `aside`, a free path, the staged one takes its place and the old one moves there; readers
    see the one or the other. Publishing verifies every byte.
    """
    final = snapshots / staged.name
    if aside is not None:
        publish_dir(staged, aside)
        replace_dir(aside, final)
    elif final.exists() or not publish_dir(staged, final):
        verify_snapshot(final, only_touched=True)
    return load_snapshot(snapshots, staged.name)


def damage_of(folder: Path, staged: Path) -> CorruptionError | None:
    """What is wrong with a snapshot, the same as a staged one; None if nothing is.

    Shards that are the objects of the staged one, untouched, are taken on trust.
    """
    try:
        verify_snapshot(folder, only_touched=True)
        for shard in read_manifest(folder).shards:
            if not (folder / shard.file).samefile(staged / shard.file):
                verify_shard(folder / shard.file, shard)
    except CorruptionError as error:
        return error
    return None
