"""The verbs `publish`, `history` and `rollback`: which snapshot a ref names and named before.

A ref is guarded where a standing recipe with a gate releases under it: what holds a content in
quarantine never gets it, whoever publishes. That reads the catalog, which is imported only then:
commands that list refs start without NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mergepipe_pipeline.domain.snapshot import Ref, Snapshot
from mergepipe_pipeline.errors import GateError, NotFoundError
from mergepipe_pipeline.execution.lookup import request_of, snapshot_of
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.commit import Checked, verify_snapshot
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.snapshots.stores import Marks
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.facts.quarantine import Quarantine


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
    if is_collected(warehouse, target):
        raise NotFoundError(
            "What a version of a ref named was collected",
            where=f"{target.name}, version {target.number}",
            expected="a version whose snapshot is kept (`mergepipe history` tells)",
            found=f"snapshot {target.snapshot_id}, which `gc --keep-versions` removed",
            next_step="choose another with --to, or merge its recipe again: it has the same id",
        )


def kept_out_in(warehouse: Warehouse, snapshot: Snapshot) -> tuple[Quarantine, ...]:
    """The quarantined contents that a snapshot was merged from, at present.

    Raises CorruptionError where a decision or the snapshot's provenance cannot be read.
    """
    from mergepipe_pipeline.facts.quarantine import kept_out, quarantined_names

    if not (decided := set(quarantined_names(warehouse))):
        return ()
    from mergepipe_pipeline.quality.regression import contents_of  # pyarrow, which few need

    return tuple(
        decision
        for (_, name), content in contents_of(warehouse, snapshot, request_of(snapshot)).items()
        if name in decided
        for decision in kept_out(warehouse, name)
        if decision.content == content
    )


def refuse_kept_out(
    warehouse: Warehouse, snapshot: Snapshot, ref: str, *, is_guarded: bool = False
) -> None:
    """Raise GateError for a snapshot with a quarantined content under a ref that a gate guards."""
    if not (kept_out := kept_out_in(warehouse, snapshot)):
        return
    from mergepipe_pipeline.deploy.recipe_files import standing_recipes

    guards = (p.ref == ref and p.gate is not None for p in standing_recipes(warehouse))
    if not is_guarded and not any(guards):
        return
    raise GateError(
        "A snapshot was merged from what is in quarantine",
        where=f"snapshot {snapshot.snapshot_id[:16]}",
        expected=f"no such content under the ref {ref}, which a gate guards",
        found="; ".join(map(str, kept_out)),
        next_step="merge without it, or let it in; `mergepipe promote SNAPSHOT --ref REF --force "
        "REASON` publishes all the same",
    )
