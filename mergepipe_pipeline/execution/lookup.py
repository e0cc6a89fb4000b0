"""Which snapshot a text names: a ref, a version of one, an id, a prefix, or a folder somewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.request import Request, RequestedModel
from mergepipe_pipeline.domain.snapshot import MANIFEST, PROVENANCE, Snapshot
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.execution.plan_store import load_plan
from mergepipe_pipeline.snapshots.find import load_snapshot, read_manifest
from mergepipe_pipeline.storage.chain import MOST_VERSIONS
from mergepipe_pipeline.text import whole_number
from mergepipe_pipeline.warehouse import Warehouse


def snapshot_named(warehouse: Warehouse, text: str) -> Snapshot:
    """The snapshot of a ref, `REF@VERSION`, an id, a unique prefix, or a snapshot's folder.

    The folder may be an exported one. Raises NotFoundError, CorruptionError (manifest).
    """
    try:
        return load_snapshot(warehouse.snapshots, snapshot_of(warehouse, text))
    except NotFoundError:
        folder = Path(text).expanduser()
        if not text or not folder.is_dir():
            raise
        if not (folder / MANIFEST).is_file():
            raise NotFoundError(
                "A folder is no snapshot",
                where=str(folder),
                expected="the folder of a snapshot, whole",
                found=f"no {MANIFEST} in it",
                next_step="give the folder that `mergepipe merge` made, or see `mergepipe ls`",
            ) from None
    manifest = read_manifest(folder)
    return Snapshot(manifest.snapshot_id, str(folder.resolve()), manifest)


def provenance_of(snapshot: Snapshot) -> dict[str, Any]:
    """How a snapshot came about. Raises CorruptionError."""
    path = Path(snapshot.path) / PROVENANCE
    if not path.is_file():  # a FIFO would keep its reader waiting
        raise CorruptionError(
            "A snapshot has no provenance",
            where=str(path),
            expected=PROVENANCE,
            found="no such file",
            next_step="copy the whole folder of the snapshot",
        )
    return unseal(path.read_bytes(), str(path))


def request_of(snapshot: Snapshot) -> Request:
    """How a snapshot was asked for; of one that no recipe made, its inputs alone.

    Raises CorruptionError.
    """
    made = provenance_of(snapshot)
    if "request" in made:
        return Request.from_json(made["request"])
    inputs = zip(snapshot.manifest.inputs, made["sources"], strict=True)
    return Request(
        models=tuple(
            RequestedModel(i.name, i.name, s["root"], s["checkpoint_id"], i.content_sha256)
            for i, s in inputs
        )
    )


def snapshot_of(warehouse: Warehouse, text: str) -> str:
    """The id that a ref, `REF@VERSION`, an id or a unique prefix means. Raises NotFoundError."""
    refs = warehouse.refs
    if text in refs:
        return refs.current(text).snapshot_id
    ref, _, number = text.rpartition("@")
    version = whole_number(number, MOST_VERSIONS)
    if ref in refs and version is not None:
        return refs.target(ref, version).snapshot_id
    return load_snapshot(warehouse.snapshots, text).snapshot_id


def plan_of(warehouse: Warehouse, text: str) -> MergePlan:
    """The plan that an id, a unique prefix, a snapshot or a ref means. Raises NotFoundError."""
    return load_plan(warehouse, _plan_id(warehouse, text))


def _plan_id(warehouse: Warehouse, text: str) -> str:
    plans = sorted(p.stem for p in warehouse.plans.glob("*.json"))
    stored = [p for p in plans if text and p.startswith(text)]
    if len(stored) == 1:
        return stored[0]
    try:
        return load_snapshot(warehouse.snapshots, snapshot_of(warehouse, text)).manifest.plan_id
    except NotFoundError as error:
        raise NotFoundError(
            "Neither a plan, a snapshot nor a ref",
            where=str(warehouse.root),
            found=repr(text),
            expected="an id, a unique prefix of one, or a ref",
            next_step="see `mergepipe ls`, or make a plan with `mergepipe plan RECIPE`",
        ) from error
