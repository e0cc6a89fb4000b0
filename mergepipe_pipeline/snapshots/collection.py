"""Removes what nobody needs: old staging, what a killed process left half-written, stages that
nothing reads, and objects and actions that neither a snapshot nor a living process names.

What is in doubt stays: the objects that a damaged snapshot links to, and what appeared since the
oldest living lease was taken.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from stat import S_ISREG

from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.snapshots.find import DamagedSnapshot, scan_snapshots
from mergepipe_pipeline.snapshots.leases import Living, Need
from mergepipe_pipeline.snapshots.stores import Marks, ObjectStore, layer_key_of, stored_by
from mergepipe_pipeline.storage.atomic import remove_tree, rename
from mergepipe_pipeline.storage.locks import is_held, probed

_NOBODY = Living(Need(), frozenset(), None, (), (), judged_by_age=False)


@dataclass(frozen=True, slots=True)
class GcReport:
    """The paths that were, or would be, removed; `snapshots` are stages and outdated results by id.

    `notes` are sentences about what stays because it is in doubt.
    """

    files: int
    nbytes: int
    paths: tuple[str, ...]
    snapshots: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Roots:
    """The roots of a collection, beside snapshots that are results.

    `marks` None: no snapshot may be removed. `notes` become those of `GcReport`. `expired` is what
    somebody else has judged, and goes. `outdated` are the ids of results that go, too, unless they
    are needed.
    """

    need: Need = field(default_factory=Need)
    living: Living = _NOBODY
    marks: Marks | None = None
    notes: tuple[str, ...] = ()
    expired: tuple[Path, ...] = ()
    outdated: frozenset[str] = frozenset()


def collect(
    objects: ObjectStore,
    snapshots: Path,
    staging: Path,
    unnamed: Iterable[Path] = (),
    roots: Roots | None = None,
    *,
    older_than_s: float,
    dry_run: bool,
) -> GcReport:
    """Remove what is older than `older_than_s` and not needed.

    `unnamed` are files without their final name yet, which go if nobody holds them.

    No lease may be taken meanwhile. Actions go before objects, so that no action ever names an
    object that is gone for good.
    """
    roots = roots or Roots()
    limit = time.time() - older_than_s
    need = roots.need | roots.living.need
    whole, damaged = scan_snapshots(snapshots)
    idle = _idle_snapshots(whole, need, roots, limit)
    kept = [s for s in whole if s not in idle]
    old = [Path(s.path) for s in idle]
    old += [
        path
        for path in (
            *(_idle_layers(objects, kept, damaged, need, roots.living, limit)),
            *_idle_staging(staging, roots.living),
            *(p for p in unnamed if not is_held(p)),
        )
        if _last_use(path) <= limit
    ]
    old += (*roots.living.dead, *roots.expired)
    nbytes = _freed_nbytes(old)
    if not dry_run:
        for snapshot in idle:
            _retire(snapshot, staging, roots)
        for path in old:
            _remove(path)
    notes = (*roots.notes, *(_stays(d) for d in damaged))
    ids = tuple(s.snapshot_id for s in idle)
    return GcReport(len(old), nbytes, tuple(str(p) for p in old), ids, notes)


def _idle_snapshots(
    whole: Sequence[Snapshot], need: Need, roots: Roots, limit: float
) -> list[Snapshot]:
    if roots.marks is None:
        return []
    stages = roots.marks.unwanted()
    # A mark says when somebody asked for a snapshot last. An older release gave results none.
    last_use = {i: _last_use(roots.marks.path_of(i)) for i in stages}
    for s in whole:
        if s.snapshot_id in roots.outdated - stages:
            mark, made_s = roots.marks.path_of(s.snapshot_id), Path(s.path).stat().st_mtime
            asked_s = _last_use(mark) if mark.exists() else made_s
            last_use[s.snapshot_id] = max(made_s, asked_s)
    return [
        s
        for s in whole
        if s.snapshot_id not in need.snapshot_ids
        and s.manifest.plan_id not in need.plan_ids
        and last_use.get(s.snapshot_id, inf) <= limit
    ]


def _retire(snapshot: Snapshot, staging: Path, roots: Roots) -> None:
    """Remove a snapshot: first by one rename, so that nobody sees a part of it."""
    aside = staging / f"collected-{snapshot.snapshot_id}"
    remove_tree(aside)
    if snapshot.snapshot_id in roots.outdated and roots.marks is not None:
        roots.marks.collect(snapshot.snapshot_id)
    rename(snapshot.path, aside)
    remove_tree(aside)
    if snapshot.snapshot_id not in roots.outdated and roots.marks is not None:
        roots.marks.forget(snapshot.snapshot_id)


def _remove(path: Path) -> None:
    """Remove what is old; of temporary files only those that nobody has locked since."""
    if path.suffix != ".tmp":
        remove_tree(path)
        return
    with probed(path) as held:  # its maker locks it, then looks whether it is still there
        if not held:
            remove_tree(path)


def _idle_layers(
    objects: ObjectStore,
    whole: Sequence[Snapshot],
    damaged: Sequence[DamagedSnapshot],
    need: Need,
    living: Living,
    limit: float,
) -> Iterator[Path]:
    """Actions, then objects; an action that was used after `limit` stays, and keeps its object."""
    if living.unreadable:
        return
    used = [s for snapshot in whole for s in snapshot.manifest.shards]
    keys = {s.layer_key for s in used} | need.layer_keys
    linked = _linked(damaged)
    digests = {s.sha256 for s in used}
    digests |= {p.name for p in objects.all_objects() if linked and _inode(p) in linked}
    actions = objects.all_actions()
    for path in actions:
        key = layer_key_of(path.stem)
        named = stored_by(path) if linked or key in need.layer_keys else None
        if named is not None and key in need.layer_keys:
            digests.add(named.sha256)
        elif key not in keys and (named is None or named.sha256 not in digests):
            if _last_use(path) <= limit:
                yield path
            elif (stored := named or stored_by(path)) is not None:
                digests.add(stored.sha256)
    for path in objects.all_objects():
        # A layer becomes an object before its action says so.
        if path.name not in digests and not _appeared_since(path, living.since_ns):
            yield path


def _idle_staging(staging: Path, living: Living) -> list[Path]:
    if not staging.is_dir():
        return []
    return [p for p in sorted(staging.iterdir()) if p.name not in living.names]


def _linked(damaged: Sequence[DamagedSnapshot]) -> set[tuple[int, int]]:
    """The files of damaged snapshots, whose objects may be all that is left of them."""
    inodes = set[tuple[int, int]]()
    for snapshot in damaged:
        with suppress(OSError):
            inodes |= {_inode(p) for p in snapshot.folder.iterdir()}
    return inodes


def _inode(path: Path) -> tuple[int, int]:
    try:
        stat = path.lstat()
    except FileNotFoundError:
        return (0, 0)
    return stat.st_dev, stat.st_ino


def _appeared_since(path: Path, since_ns: int | None) -> bool:
    try:
        return since_ns is not None and path.lstat().st_ctime_ns >= since_ns
    except FileNotFoundError:
        return False


def _stays(damaged: DamagedSnapshot) -> str:
    return f"a damaged snapshot stays, with the objects that it links to: {damaged.error}"


def _last_use(path: Path) -> float:
    """Seconds since the epoch; infinite for what another process removed meanwhile.

    Of an action or a mark the time of writing counts: whoever uses one sets it, and a collection
    reads it. What a killed process left may be a second name of one.
    """
    try:
        stat = path.lstat()
        is_read_here = path.suffix in (".json", ".tmp")
        return stat.st_mtime if is_read_here else max(stat.st_mtime, stat.st_atime)
    except FileNotFoundError:
        return inf


def _freed_nbytes(paths: Sequence[Path]) -> int:
    """The bytes of the files that lose all their names; a link to what stays frees nothing."""
    removed = Counter[tuple[int, int, int, int]]()
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            with suppress(FileNotFoundError):
                stat = file.lstat()
                if S_ISREG(stat.st_mode):
                    inode = stat.st_dev, stat.st_ino
                    removed[*inode, stat.st_nlink, stat.st_size] += 1
    return sum(size for (*_, links, size), n in removed.items() if n >= links)
