"""Makes a staged snapshot exist: one rename. Committing the same result twice succeeds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.snapshots.checks import verify_snapshot
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.storage.atomic import publish_dir, replace_dir

_LOG = logging.getLogger("mergepipe")


def commit_snapshot(
    staged: Path, snapshots: Path, quarantine: Callable[[], Path] | None = None
) -> Snapshot:
    """The snapshot of a staged folder, which is named by its id.

    Of a snapshot that exists already every byte is read. If it is whole, it is returned; if it is
    damaged, it moves to the folder that `quarantine` makes, and the staged one takes its place:
    readers see the one or the other. Without `quarantine` it raises CorruptionError.
    """
    final = snapshots / staged.name
    if (final.exists() or not publish_dir(staged, final)) and (damage := damage_of(final)):
        if quarantine is None:
            raise damage
        aside = quarantine() / "snapshots" / final.name
        publish_dir(staged, aside)
        replace_dir(aside, final)
        damage.next_step = None  # it is done
        _LOG.warning("A damaged snapshot was made anew; it lies in %s. %s", aside, damage)
    return load_snapshot(snapshots, staged.name)


def damage_of(folder: Path, *, is_copy: bool = False) -> CorruptionError | None:
    """What is wrong with a snapshot or a copy, of which every byte is read; None if nothing is."""
    try:
        verify_snapshot(folder, is_copy=is_copy)
    except CorruptionError as error:
        return error
    return None
