"""Finds committed snapshots. A snapshot exists iff its folder exists.

A damaged one is listed as damaged and hides no other.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.domain.snapshot import MANIFEST, Manifest, Snapshot
from mergepipe_pipeline.errors import CorruptionError, NotFoundError


@dataclass(frozen=True, slots=True)
class DamagedSnapshot:
    """A folder that is no snapshot any more, and why."""

    folder: Path
    error: CorruptionError


def list_snapshots(snapshots: Path) -> list[Snapshot]:
    """All snapshots that can be read, by id; `scan_snapshots` tells of the others, too."""
    return scan_snapshots(snapshots)[0]


def scan_snapshots(snapshots: Path) -> tuple[list[Snapshot], list[DamagedSnapshot]]:
    """All snapshots by id: those that can be read, and those that are damaged."""
    whole, damaged = [], []
    for snapshot_id in _ids(snapshots):
        try:
            whole.append(_load(snapshots, snapshot_id))
        except CorruptionError as error:
            damaged.append(DamagedSnapshot(snapshots / snapshot_id, error))
    return whole, damaged


def load_snapshot(snapshots: Path, snapshot_id: str) -> Snapshot:
    """A snapshot by id or unique prefix. Raises NotFoundError, CorruptionError (manifest)."""
    is_name = snapshot_id == Path(snapshot_id).name and not snapshot_id.startswith(".")
    if snapshot_id and is_name and os.path.isdir(snapshots / snapshot_id):
        return _load(snapshots, snapshot_id)
    ids = _ids(snapshots)
    matches = [i for i in ids if snapshot_id and i.startswith(snapshot_id)]
    if len(matches) != 1:
        raise NotFoundError(
            "No such snapshot" if not matches else "More than one snapshot starts like this",
            where=str(snapshots),
            expected="the id of a snapshot, or a unique prefix",
            found=f"{snapshot_id!r} (snapshots here: {len(ids)})",
            next_step="see `mergepipe ls`",
        )
    return _load(snapshots, matches[0])


def _load(snapshots: Path, snapshot_id: str) -> Snapshot:
    folder = snapshots / snapshot_id
    manifest = read_manifest(folder)
    if manifest.snapshot_id != snapshot_id:
        raise CorruptionError(
            "A snapshot's manifest is not its own",
            where=str(folder / MANIFEST),
            expected=snapshot_id,
            found=manifest.snapshot_id,
            next_step="merge its recipe again: it is made anew, and layers are reused",
        )
    return Snapshot(snapshot_id, str(folder), manifest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a snapshot or exported folder. Raises CorruptionError."""
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")
        data = path.read_bytes()
    except OSError as error:
        raise CorruptionError(
            "A snapshot has no manifest",
            where=str(path),
            expected=MANIFEST,
            found=error.strerror or str(error),
            next_step="merge its recipe again: it is made anew, and layers are reused",
        ) from error
    return manifest_of(data, str(path))


def manifest_of(data: bytes, where: str) -> Manifest:
    """The manifest in a file's bytes, made by anybody. Raises CorruptionError.

    Its files have names of their own in its folder; what names files elsewhere is a digest.
    """
    # It loads pydantic, which commands that only list refs start without.
    from mergepipe_pipeline.storage.forms import read_form

    next_step = "read it with the version that wrote it"
    return read_form(Manifest, data, where, "A manifest", next_step)[0]


def files_below(folder: Path, names: Collection[str]) -> set[str]:
    """The entries of a snapshot's folder, and of the folders in it that `names` lie in."""
    parts = {name.partition("/")[0] for name in names if "/" in name}
    out = set()
    for path in folder.iterdir():
        if path.name in parts and path.is_dir() and not path.is_symlink():
            out |= {f"{path.name}/{p.name}" for p in path.iterdir()}
        else:
            out.add(path.name)
    return out


def _ids(snapshots: Path) -> list[str]:
    if not snapshots.is_dir():
        return []
    return sorted(p.name for p in snapshots.iterdir() if p.is_dir() and not p.name.startswith("."))
