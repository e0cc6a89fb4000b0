"""Finds committed snapshots. A snapshot exists iff its folder exists."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.snapshots.stage import MANIFEST
from mergepipe_pipeline.spec.snapshot import Manifest, Snapshot


def list_snapshots(snapshots: Path) -> list[Snapshot]:
    """All snapshots, by id. Raises CorruptionError for a damaged manifest."""
    return [load_snapshot(snapshots, i) for i in _ids(snapshots)]


def load_snapshot(snapshots: Path, snapshot_id: str) -> Snapshot:
    """A snapshot by id or unique prefix. Raises NotFoundError, CorruptionError (manifest)."""
    ids = _ids(snapshots)
    matches = [i for i in ids if snapshot_id and i.startswith(snapshot_id)]
    if len(matches) != 1:
        raise NotFoundError(
            "No such snapshot" if not matches else "More than one snapshot starts like this",
            where=str(snapshots),
            expected="the id of a snapshot, or a unique prefix",
            found=f"{snapshot_id!r} ({len(ids)} snapshots exist)",
            next_step="see `mergepipe ls`",
        )
    folder = snapshots / matches[0]
    manifest = read_manifest(folder)
    if manifest.snapshot_id != matches[0]:
        raise CorruptionError(
            "A snapshot's manifest is not its own",
            where=str(folder / MANIFEST),
            expected=matches[0],
            found=manifest.snapshot_id,
            next_step="remove the folder and merge again: layers are reused",
        )
    return Snapshot(matches[0], str(folder), manifest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a snapshot or exported folder. Raises CorruptionError."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CorruptionError(
            "A snapshot has no manifest",
            where=str(path),
            expected=MANIFEST,
            found="no such file",
            next_step="remove the folder and merge again: layers are reused",
        ) from None
    value = unseal(data, str(path))
    try:
        return Manifest.from_json(value)
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptionError(
            "A manifest has another form than this version writes",
            where=str(path),
            found=str(error),
            next_step="read it with the version that wrote it",
        ) from error


def _ids(snapshots: Path) -> list[str]:
    if not snapshots.is_dir():
        return []
    return sorted(p.name for p in snapshots.iterdir() if p.is_dir() and not p.name.startswith("."))
