"""The verbs `publish`, `history` and `rollback`: which snapshot a ref names and named before."""

from __future__ import annotations

from mergepipe_pipeline.snapshots.checks import verify_snapshot
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.spec.snapshot import Ref
from mergepipe_pipeline.warehouse import Warehouse


def publish(
    warehouse: Warehouse,
    snapshot_id: str,
    ref: str,
    *,
    reason: str = "published",
    expected: int | None = None,
    audit: bool = True,
) -> Ref:
    """Make `ref` name the snapshot, after checking every byte of it (unless `audit` is False).

    `expected` is the version the caller has seen; another one raises CommitConflictError. Raises
    NotFoundError for an unknown snapshot, CorruptionError for a damaged one.
    """
    found_id = load_snapshot(warehouse.snapshots, snapshot_id).snapshot_id
    with warehouse.leases.hold(Need(snapshot_ids=frozenset([found_id])), "publish"):
        snapshot = load_snapshot(warehouse.snapshots, found_id)
        if audit:
            verify_snapshot(warehouse.snapshots / snapshot.snapshot_id)
        return warehouse.refs.publish(ref, snapshot.snapshot_id, reason, expected)


def history(warehouse: Warehouse, ref: str) -> tuple[Ref, ...]:
    """Every version of a ref, oldest first. Raises NotFoundError."""
    return tuple(warehouse.refs.history(ref))


def rollback(
    warehouse: Warehouse, ref: str, to: int | None = None, reason: str = "rollback"
) -> Ref:
    """Publish again what version `to` named (default: the last different snapshot).

    Every byte of it is checked first. Raises NotFoundError, CorruptionError.
    """
    refs = warehouse.refs
    target = refs.target(ref, to)
    verify_snapshot(
        warehouse.snapshots / load_snapshot(warehouse.snapshots, target.snapshot_id).snapshot_id
    )
    return refs.rollback(ref, target.number, reason)
