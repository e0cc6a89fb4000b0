"""The verb `pull`: a snapshot of the bucket comes into the warehouse."""

from __future__ import annotations

from mergepipe_pipeline.domain.outcome import StoredObject
from mergepipe_pipeline.domain.snapshot import PROVENANCE, Manifest, Snapshot
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.execution.plan_leases import staging as staging_of
from mergepipe_pipeline.integrity.records import refuse_other_lineage
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.commit import (
    commit_snapshot,
    damage_of,
    stage_snapshot,
    verify_snapshot,
)
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.snapshots.foreign import provenance_from
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.snapshots.mirror import Mirror, mirror_at, provenance_key
from mergepipe_pipeline.snapshots.stores import Marks
from mergepipe_pipeline.storage.chain import MOST_VERSIONS
from mergepipe_pipeline.text import whole_number
from mergepipe_pipeline.warehouse import Warehouse


def pull(
    warehouse: Warehouse, what: str, source: str | None = None, progress: Progress | None = None
) -> Snapshot:
    """Make a snapshot of the bucket one of the warehouse; objects that are here do not come again.

    `what` is a ref, `REF@VERSION`, an id or a unique prefix in the bucket, not here; `source` the
    address of a bucket, by default MERGEPIPE_BUCKET; from another one, later merges reuse nothing.
    Nothing is published. One that is here and damaged is made anew. Raises NotFoundError,
    CorruptionError for what is damaged there, and RemoteError.
    """
    mirror, progress = _mirror(warehouse, source), progress or Silent()
    snapshot_id = _snapshot_id(mirror, what)
    need = Need(snapshot_ids=frozenset([snapshot_id]))
    with warehouse.leases.hold(need, "pull"):
        is_here = snapshot_id in {p.name for p in warehouse.snapshots.glob("*")}
        if is_here and damage_of(warehouse.snapshots / snapshot_id) is None:
            return load_snapshot(warehouse.snapshots, snapshot_id)
        manifest = mirror.manifest(snapshot_id)
        keys = frozenset(s.layer_key for s in manifest.shards)
        with warehouse.leases.hold(Need(layer_keys=keys), "pull"):
            return _pulled(warehouse, mirror, manifest, progress)


def _pulled(
    warehouse: Warehouse, mirror: Mirror, manifest: Manifest, progress: Progress
) -> Snapshot:
    store = warehouse.objects
    made = {s.file: StoredObject(s.sha256, s.nbytes, s.tensors) for s in manifest.shards}
    missing = [s for s in manifest.shards if not store.is_intact(made[s.file])]
    total = sum(s.nbytes for s in missing)
    with (
        staging_of(warehouse, "pull") as staging,
        progress.task(f"pull {manifest.snapshot_id[:12]}", total) as advance,
    ):
        sides = dict(mirror.side_files(manifest))
        where = mirror.bucket.where(provenance_key(manifest.snapshot_id))
        provenance = provenance_from(sides.pop(PROVENANCE), manifest, where)
        for shard in missing:
            stored, path = made[shard.file], staging / shard.sha256
            if not mirror.fetch(stored, path, advance):
                raise CorruptionError(
                    "An object of a snapshot is not in the bucket",
                    where=f"{mirror.bucket.address.text}, {shard.file}",
                    expected=f"sha256 {shard.sha256[:16]}",
                    found="no such object",
                    next_step="publish the snapshot again from a warehouse that has it",
                )
            store.adopt(path, stored)
        # Later merges believe what actions say: only the warehouse's own bucket may tell them.
        for shard in manifest.shards if mirror == warehouse.mirror else ():
            for action_key, stored in mirror.actions(shard):
                store.record(action_key, stored)
        staged = stage_snapshot(staging, manifest, store, sides, provenance)
        # Its files may be no shards, and it may tell of plans and inputs that are here otherwise.
        verify_snapshot(staged)
        refuse_other_lineage(warehouse, Snapshot(manifest.snapshot_id, str(staged), manifest))
        snapshot = commit_snapshot(staged, warehouse.snapshots, warehouse.new_aside)
    Marks(warehouse.stages).mark(snapshot.snapshot_id, is_stage=False, is_new=True)
    return snapshot


def _mirror(warehouse: Warehouse, source: str | None) -> Mirror:
    if source is not None:
        return mirror_at(source, "--from")
    return warehouse.require_mirror("pull from", ", or give --from")


def _snapshot_id(mirror: Mirror, what: str) -> str:
    """The id that a ref, a version of one, an id or a prefix means in the bucket."""
    versions = mirror.versions()
    name, _, number = what.rpartition("@")
    if what in versions:
        return mirror.version(what, versions[what][-1]).snapshot_id
    version = whole_number(number, MOST_VERSIONS)
    if name in versions and version is not None:
        return mirror.version(name, version).snapshot_id
    matching = [i for i in mirror.snapshot_ids() if what and i.startswith(what)]
    if len(matching) == 1:
        return matching[0]
    raise NotFoundError(
        "No such ref or snapshot in the bucket"
        if not matching
        else "More than one starts like this",
        where=mirror.bucket.address.text,
        expected=", ".join(sorted(versions)) or "a ref or a snapshot's id",
        found=repr(what),
        next_step="choose one that was published there",
    )
