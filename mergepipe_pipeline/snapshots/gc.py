"""Removes what nobody needs: old staging, what a killed process left half-written, and objects and
actions that no snapshot names.

Young files stay, since a merge in progress may be about to use them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from mergepipe_pipeline.snapshots.load import list_snapshots
from mergepipe_pipeline.snapshots.objects import ObjectStore
from mergepipe_pipeline.storage.atomic import remove_tree


@dataclass(frozen=True, slots=True)
class Collected:
    """What was, or would be, removed."""

    files: int
    nbytes: int
    paths: tuple[str, ...]


def collect(
    objects: ObjectStore,
    snapshots: Path,
    staging: Path,
    written: Sequence[Path] = (),
    *,
    older_than_s: float,
    dry_run: bool,
) -> Collected:
    """Remove what is older than `older_than_s` and unreferenced; of `written` only files without
    their final name.

    Raises CorruptionError (manifests).

    Actions go before objects, so that no action ever names an object that is gone for good.
    """
    used = [s for snapshot in list_snapshots(snapshots) for s in snapshot.manifest.shards]
    keys, digests = {s.layer_key for s in used}, {s.sha256 for s in used}
    doomed = [p for p in objects.all_actions() if p.stem not in keys]
    doomed += [p for p in objects.all_objects() if p.name not in digests]
    doomed += sorted(staging.iterdir()) if staging.is_dir() else []
    doomed += [p for folder in written for p in sorted(folder.rglob(".*.tmp"))]
    limit = time.time() - older_than_s
    old = [p for p in doomed if _last_use(p) <= limit]
    nbytes = sum(_nbytes(p) for p in old)
    if not dry_run:
        for path in old:
            remove_tree(path)
    return Collected(len(old), nbytes, tuple(str(p) for p in old))


def _last_use(path: Path) -> float:
    """Seconds since the epoch; infinite for what another process removed meanwhile."""
    try:
        found = path.lstat()
        return max(found.st_mtime, found.st_atime)
    except FileNotFoundError:
        return inf


def _nbytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(p.lstat().st_size for p in files if p.is_file())
