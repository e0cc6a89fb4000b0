"""The scope *lineage* of `verify --all`: every record agrees with the records that it names.

Snapshots agree with the plans and actions they came from and with the contents of their inputs;
refs and releases name snapshots that are there. No weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.domain.plan import ENGINE_VERSION
from mergepipe_pipeline.domain.snapshot import MANIFEST, Snapshot
from mergepipe_pipeline.errors import CorruptionError, MergePipeError, NotFoundError
from mergepipe_pipeline.execution.lookup import provenance_of
from mergepipe_pipeline.execution.plan_store import load_plan
from mergepipe_pipeline.integrity.auditor import Auditor
from mergepipe_pipeline.integrity.records import action_of, readable_snapshots, snapshot_folders
from mergepipe_pipeline.snapshots.marks import Marks
from mergepipe_pipeline.snapshots.objects import layer_key_of
from mergepipe_pipeline.storage.chain import read_chains
from mergepipe_pipeline.warehouse import Warehouse


def verify_lineage(warehouse: Warehouse, audit: Auditor) -> None:
    """Compare every record with those that it names."""
    actions: dict[str, list[Path]] = {}
    for path in warehouse.objects.all_actions():
        actions.setdefault(layer_key_of(path.stem), []).append(path)
    for snapshot in readable_snapshots(warehouse):
        manifest = Path(snapshot.path) / MANIFEST
        audit.check("lineage", manifest, partial(_check_plan, warehouse, snapshot))
        audit.check("lineage", manifest, partial(_check_inputs, warehouse, snapshot))
        _check_actions(actions, snapshot, audit)
    snapshot_ids = {folder.name for folder in snapshot_folders(warehouse)}
    marks = Marks(warehouse.stages)
    versions = list(read_chains(warehouse.refs_dir))
    newest = {name: number for name, number, _ in versions}
    for name, number, value in versions:
        if not isinstance(value, CorruptionError):  # those are structure's findings
            path = warehouse.refs_dir / name / f"{number:08d}.json"
            snapshot_id = str(value.get("snapshot_id"))
            if number == newest[name] or not marks.is_collected(snapshot_id):
                _check_named(snapshot_id, snapshot_ids, path, audit)
    for path in sorted(warehouse.releases.glob("*.released.json")):
        with suppress(MergePipeError, OSError):
            released = unseal(path.read_bytes(), str(path)).get("snapshot_id", "")
            _check_named(str(released), snapshot_ids, path, audit)


def refuse_other_lineage(warehouse: Warehouse, snapshot: Snapshot) -> None:
    """Raise CorruptionError for a snapshot that tells of plans and inputs what is not so here."""
    _check_plan(warehouse, snapshot)
    _check_inputs(warehouse, snapshot)


def _check_plan(warehouse: Warehouse, snapshot: Snapshot) -> None:
    """The plan, where it is still there, has the layer keys of the manifest."""
    try:
        plan = load_plan(warehouse, snapshot.manifest.plan_id)
    except (NotFoundError, CorruptionError):
        return
    keys = {layer.name: layer.layer_key for layer in plan.layers}
    for shard in snapshot.manifest.shards:
        if keys.get(shard.layer) != shard.layer_key:
            raise CorruptionError(
                "A snapshot's layer is not the one of its plan",
                where=f"{snapshot.path}, layer {shard.layer}",
                expected=f"layer key {str(keys.get(shard.layer))[:16]}",
                found=shard.layer_key[:16],
                next_step="`mergepipe replay` tells whether its bits are right",
            )


def _check_inputs(warehouse: Warehouse, snapshot: Snapshot) -> None:
    """The contents in the manifest are those that the catalog knows now."""
    catalog = warehouse.catalog
    try:
        provenance = provenance_of(snapshot)
    except MergePipeError:
        return
    if provenance.get("engine_version") != ENGINE_VERSION:  # contents were digested otherwise
        return
    for source, entry in zip(provenance["sources"], snapshot.manifest.inputs, strict=False):
        try:
            content = catalog.content_sha256(source["checkpoint_id"])
        except NotFoundError:
            continue
        if content != entry.content_sha256:
            raise CorruptionError(
                "A snapshot tells another content of an input than the catalog",
                where=f"{snapshot.path}, input {entry.name}",
                expected=f"content {content[:16]}",
                found=f"content {entry.content_sha256[:16]}",
                next_step="`mergepipe verify --all --scope inputs` tells whether the catalog is "
                "right, `mergepipe replay` whether the snapshot is",
            )


def _check_actions(
    actions: Mapping[str, Sequence[Path]], snapshot: Snapshot, audit: Auditor
) -> None:
    """The actions of its layer keys give the objects of the manifest."""
    pairs = ((s, path) for s in snapshot.manifest.shards for path in actions.get(s.layer_key, ()))
    for shard, path in pairs:
        action = action_of(path)
        if action and action.sha256 != shard.sha256:
            error = CorruptionError(
                "An action gives another object than a snapshot has for the same layer key",
                where=f"{path}, layer {shard.layer} of {snapshot.snapshot_id}",
                expected=f"object {shard.sha256[:16]}",
                found=f"object {action.sha256[:16]}",
            )
            audit.report("lineage", path, error, is_derivable=True)


def _check_named(snapshot_id: str, snapshot_ids: set[str], path: Path, audit: Auditor) -> None:
    if snapshot_id not in snapshot_ids:
        error = CorruptionError(
            "A name stands for a snapshot that is not there",
            where=str(path),
            expected=f"snapshot {snapshot_id}",
            found="no such folder",
            next_step="restore it, merge its recipe again, or `mergepipe rollback` to another",
        )
        audit.report("lineage", path, error)
