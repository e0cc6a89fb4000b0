"""Finds committed snapshots. A snapshot exists iff its folder exists.

A damaged one is listed as damaged and hides no other.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.snapshots.stage import PROVENANCE
from mergepipe_pipeline.spec.snapshot import MANIFEST, Manifest, ShardEntry, SideFile, Snapshot

_DIGEST = re.compile("[0-9a-f]{64}")
_LONGEST_NAME_NBYTES = 255


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
    value = unseal(data, where)
    try:
        manifest = Manifest.from_json(value)
        if problem := next(_problems(manifest), None):
            raise ValueError(problem)
        return manifest
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CorruptionError(
            "A manifest has another form than this version writes",
            where=where,
            found=str(error)[:200],
            next_step="read it with the version that wrote it",
        ) from error


def _problems(manifest: Manifest) -> Iterator[str]:
    files: list[ShardEntry | SideFile] = [*manifest.shards, *manifest.side_files]
    shards = {s.file for s in manifest.shards}
    for name, times in Counter(f.file for f in files).items():
        # Side files may lie in a folder of the folder, as those of sentence-transformers.
        parts = name.split("/", 1) if isinstance(name, str) and name not in shards else [name]
        if not all(map(_is_plain, parts)):
            yield f"the file {name!r}, which is no name in a folder"
        elif times > 1 or name in (MANIFEST, PROVENANCE):
            yield f"the file {name!r} twice"
    digests = [f.sha256 for f in files] + [s.layer_key for s in manifest.shards]
    for digest in digests + [d for s in manifest.shards for _, d in s.tensors]:
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            yield f"{digest!r} instead of a digest"
    for number in [f.nbytes for f in files] + [n for _, _, n in manifest.operators]:
        if type(number) is not int or number < 0:
            yield f"{number!r} instead of a number"
    texts = [manifest.plan_id, manifest.method, *(s.layer for s in manifest.shards)]
    texts += [t for s in manifest.shards for t, _ in s.tensors]
    texts += [t for i in manifest.inputs for t in (i.role, i.name, i.content_sha256)]
    for text in texts + [t for name, variant, _ in manifest.operators for t in (name, variant)]:
        if not isinstance(text, str):
            yield f"{text!r} instead of a text"


def files_below(folder: Path, names: Collection[str]) -> set[str]:
    """What there is in a snapshot's folder, and in the folders in it that `names` lie in."""
    parts = {name.partition("/")[0] for name in names if "/" in name}
    out = set()
    for path in folder.iterdir():
        if path.name in parts and path.is_dir() and not path.is_symlink():
            out |= {f"{path.name}/{p.name}" for p in path.iterdir()}
        else:
            out.add(path.name)
    return out


def _is_plain(name: object) -> bool:
    """Whether a file of this name lies in its folder itself, and can be shown."""
    return (
        isinstance(name, str)
        and name == Path(name).name
        and name not in ("", "..")
        and name.isprintable()
        and len(name.encode()) <= _LONGEST_NAME_NBYTES
    )


def _ids(snapshots: Path) -> list[str]:
    if not snapshots.is_dir():
        return []
    return sorted(p.name for p in snapshots.iterdir() if p.is_dir() and not p.name.startswith("."))
