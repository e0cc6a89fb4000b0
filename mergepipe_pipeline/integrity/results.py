"""The scope *digests* of `verify --all`: every byte of every result is what was written.

Objects hash to their names; snapshots hold what their manifests say; actions name objects that are
there. A shard that is a link to its object is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.domain.outcome import StoredObject
from mergepipe_pipeline.domain.snapshot import ShardEntry, Snapshot
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.integrity.auditor import Auditor
from mergepipe_pipeline.progress import Advance, Progress
from mergepipe_pipeline.snapshots.commit import check_side, verify_shard
from mergepipe_pipeline.snapshots.find import list_snapshots
from mergepipe_pipeline.snapshots.stores import stored_by
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.warehouse import Warehouse

#: A file to hash, and how.
_Work = tuple[Path, Callable[[Advance], None], bool]


def verify_digests(warehouse: Warehouse, audit: Auditor, progress: Progress) -> None:
    """Hash every object, shard and side file."""
    work = [*_objects(warehouse), *_own_shards(warehouse)]
    total = sum(_nbytes(path) for path, _, _ in work)
    with progress.task("verify", total) as advance, Workers(threads.FILES) as workers:

        def run(check_of_file: _Work) -> None:
            path, check, is_derivable = check_of_file

            def act() -> None:
                check(advance)
                audit.hashed(_nbytes(path))

            audit.check("digests", path, act, is_derivable=is_derivable)

        for _ in workers.map(run, work):
            pass
    for snapshot in list_snapshots(warehouse.snapshots):
        for side in snapshot.manifest.side_files:
            path = Path(snapshot.path) / side.file
            if path.exists():
                audit.check("digests", path, partial(check_side, path, side.sha256))
    for path in warehouse.objects.all_actions():
        audit.check("digests", path, partial(_check_action, warehouse, path), is_derivable=True)


def _objects(warehouse: Warehouse) -> Iterator[_Work]:
    """All objects; a finding names the tensor where a record describes the object.

    Taking away the name of a damaged one harms no snapshot, which has a name of its own for it, and
    keeps later merges from taking it for a layer.
    """
    described = dict(_described(warehouse))
    for path in warehouse.objects.all_objects():
        yield path, partial(_check_object, path, described.get(path.name)), True


def _described(warehouse: Warehouse) -> Iterator[tuple[str, ShardEntry | StoredObject]]:
    for path in warehouse.objects.all_actions():
        if (entry := stored_by(path)) is not None:
            yield entry.sha256, entry
    for snapshot in list_snapshots(warehouse.snapshots):
        yield from ((shard.sha256, shard) for shard in snapshot.manifest.shards)


def _check_object(path: Path, entry: ShardEntry | StoredObject | None, advance: Advance) -> None:
    digest = file_sha256(path, advance)
    if digest == path.name:
        return
    if entry is not None:
        verify_shard(path, entry)
    raise CorruptionError(
        "An object's bytes are not the bytes that were written",
        where=str(path),
        expected=f"sha256 {path.name[:16]}",
        found=f"sha256 {digest[:16]}",
        next_step="merge again: the layer is made anew",
    )


def _own_shards(warehouse: Warehouse) -> Iterator[_Work]:
    """Shards of snapshots that are not their objects: copies, replaced files, and damaged ones.

    Of a link to a right object nothing more is to be read. It is the snapshot's as long as it has
    the object's inode.
    """
    store = warehouse.objects
    for snapshot in list_snapshots(warehouse.snapshots):
        for shard in snapshot.manifest.shards:
            path = Path(snapshot.path) / shard.file
            if path.exists() and not _is_same(path, store.path_of(shard.sha256)):
                yield path, partial(verify_shard, path, shard), False


def _nbytes(path: Path) -> int:
    """The size of a file; 0 of one that a collection has removed meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def report_shards(warehouse: Warehouse, audit: Auditor) -> None:
    """Name the snapshots whose shards are damaged objects."""
    damaged = {Path(f.file).name for f in audit.findings if f.scope == "digests"}
    store = warehouse.objects
    for snapshot in list_snapshots(warehouse.snapshots):
        for shard in snapshot.manifest.shards:
            if shard.sha256 in damaged and _is_same(
                Path(snapshot.path) / shard.file, store.path_of(shard.sha256)
            ):
                _report(snapshot, shard, audit)


def _report(snapshot: Snapshot, shard: ShardEntry, audit: Auditor) -> None:
    path = Path(snapshot.path) / shard.file
    error = CorruptionError(
        "A snapshot's shard is a damaged object",
        where=f"{path}, layer {shard.layer}",
        expected=f"sha256 {shard.sha256[:16]}",
        found="other bytes",
        next_step="run `mergepipe repair`, then merge its recipe again: it is made anew",
    )
    audit.report("digests", path, error)


def _check_action(warehouse: Warehouse, path: Path) -> None:
    """An action names an object that is there, at its length. Damaged actions are structure's."""
    entry = stored_by(path)
    if entry is None:
        return
    target = warehouse.objects.path_of(entry.sha256)
    found = f"{target.stat().st_size} bytes" if target.exists() else "no such object"
    if found != f"{entry.nbytes} bytes":
        raise CorruptionError(
            "An action names an object that is not there",
            where=str(path),
            expected=f"object {target.name[:16]} of {entry.nbytes} bytes",
            found=found,
            next_step="merge again: the layer is made anew",
        )
