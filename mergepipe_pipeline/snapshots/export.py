"""Copies a snapshot out into a plain model folder that its owner may edit."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.snapshots.load import read_manifest
from mergepipe_pipeline.spec.snapshot import Snapshot
from mergepipe_pipeline.storage.atomic import copy_file, publish_dir, remove_tree, write_atomic


def check_out(out: Path) -> None:
    """Refuse an output folder that holds something else, before any work is done."""
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or _snapshot_in(out))):
        raise MergePipeError(
            "The output folder is not empty",
            where=str(out),
            expected="no such folder, an empty one, or one written by mergepipe",
            found="other files",
            next_step="choose another --out, or empty the folder",
        )


def export_snapshot(snapshot: Snapshot, out: Path, extra: Mapping[str, bytes]) -> None:
    """Make `out` a copy of the snapshot plus `extra` files, by one rename at the end.

    A folder that holds this snapshot already is left as it is; one that holds another snapshot is
    refused, like any other content, with MergePipeError. Raises StorageFullError.
    """
    check_out(out)
    existing = _snapshot_in(out)
    if existing == snapshot.snapshot_id:
        return
    if existing is not None:
        raise MergePipeError(
            "The output folder holds another snapshot",
            where=str(out),
            expected=snapshot.snapshot_id,
            found=existing,
            next_step="choose another --out, or remove the folder",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        staged.mkdir()
        for file in sorted(Path(snapshot.path).iterdir()):
            copy_file(file, staged / file.name)
        for name, data in extra.items():
            write_atomic(staged / name, data)
        if not publish_dir(staged, out):
            check_out(out)
    finally:
        remove_tree(staged)


def _snapshot_in(out: Path) -> str | None:
    try:
        return read_manifest(out).snapshot_id
    except CorruptionError:
        return None
