"""The verbs `publish`, `history` and `rollback`: which snapshot a ref names and named before."""

from __future__ import annotations

from mergepipe_pipeline.domain.snapshot import Ref, Snapshot
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.execution.lookup import snapshot_of
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.commit import Checked, verify_snapshot
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.snapshots.stores import Marks
from mergepipe_pipeline.warehouse import Warehouse


def publish(
    warehouse: Warehouse,
    what: str,
    ref: str,
    *,
    reason: str = "published",
    expected: int | None = None,
    audit: bool = True,
    checked: Checked | None = None,
    is_forced: bool = False,
    progress: Progress | None = None,
) -> Ref:
    """Make `ref` name a snapshot, after checking every byte of it (unless `audit` is False).

    Shards that the caller has `checked` are not read again.
    `what` is an id, a unique prefix of one, a ref, or REF@VERSION. `expected` is the version the
    caller has seen; another one raises CommitConflictError. Raises NotFoundError for an unknown
    snapshot, CorruptionError for a damaged one, and unless it `is_forced` GateError for one with a
    quarantined content under a ref that a gate guards. If there is a bucket, the ref names the
    snapshot there first: see `Mirror.publish` for what that raises.
    """
    found_id = snapshot_of(warehouse, what)
    with warehouse.leases.hold(Need(snapshot_ids=frozenset([found_id])), "publish"):
        snapshot = load_snapshot(warehouse.snapshots, found_id)
        if not is_forced:
            # It reads the catalog; commands that only list refs start without NumPy.
            from mergepipe_pipeline.verbs.guard import refuse_kept_out

            refuse_kept_out(warehouse, snapshot, ref)
        if audit:
            folder = warehouse.snapshots / snapshot.snapshot_id
            verify_snapshot(folder, checked=checked or Checked())
        warehouse.refs.refuse_other(ref, expected)
        _mirror(warehouse, snapshot, ref, reason, progress or Silent())
        return warehouse.refs.publish(ref, snapshot.snapshot_id, reason, expected)


def _mirror(
    warehouse: Warehouse, snapshot: Snapshot, ref: str, reason: str, progress: Progress
) -> None:
    """Publish in the bucket, too, if there is one."""
    if warehouse.mirror is None:
        return
    total = sum(s.nbytes for s in snapshot.manifest.shards)
    with progress.task(f"publish in {warehouse.mirror.bucket.address.text}", total) as advance:
        warehouse.mirror.publish(snapshot, warehouse.objects, ref, reason, advance)


def history(warehouse: Warehouse, ref: str) -> tuple[Ref, ...]:
    """Every version of a ref, oldest first. Raises NotFoundError."""
    return tuple(warehouse.refs.history(ref))


def is_collected(warehouse: Warehouse, version: Ref) -> bool:
    """Whether the snapshot of a version was removed, as older than what is kept."""
    folder = warehouse.snapshots / version.snapshot_id
    return not folder.exists() and Marks(warehouse.stages).is_collected(version.snapshot_id)


def rollback(
    warehouse: Warehouse, ref: str, to: int | None = None, reason: str = "rollback"
) -> Ref:
    """Publish again what version `to` named (default: the last different snapshot).

    Every byte of it is checked first. Raises NotFoundError, CorruptionError.
    """
    refs = warehouse.refs
    target = refs.target(ref, to)
    with warehouse.leases.hold(Need(snapshot_ids=frozenset([target.snapshot_id])), "rollback"):
        _refuse_collected(warehouse, target)
        snapshot = load_snapshot(warehouse.snapshots, target.snapshot_id)
        verify_snapshot(warehouse.snapshots / snapshot.snapshot_id)
        _mirror(warehouse, snapshot, ref, f"{reason} to version {target.number}", Silent())
        return refs.rollback(ref, target.number, reason)


def _refuse_collected(warehouse: Warehouse, target: Ref) -> None:
    """Raise NotFoundError if what a version names was removed by a collection."""
    if is_collected(warehouse, target):
        raise NotFoundError(
            "What a version of a ref named was collected",
            where=f"{target.name}, version {target.number}",
            expected="a version whose snapshot is kept (`mergepipe history` tells)",
            found=f"snapshot {target.snapshot_id}, which `gc --keep-versions` removed",
            next_step="choose another with --to, or merge its recipe again: it has the same id",
        )
