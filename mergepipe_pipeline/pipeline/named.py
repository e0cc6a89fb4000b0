"""Which snapshot a text names: a ref, a version of one, an id, a prefix, or a folder somewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.pipeline.inspect import snapshot_of
from mergepipe_pipeline.snapshots.load import load_snapshot, read_manifest
from mergepipe_pipeline.snapshots.stage import MANIFEST, PROVENANCE
from mergepipe_pipeline.spec.snapshot import Snapshot
from mergepipe_pipeline.warehouse import Warehouse


def snapshot_named(home: Warehouse, what: str) -> Snapshot:
    """The snapshot of a ref, `REF@VERSION`, an id, a unique prefix, or a snapshot's folder.

    The folder may be an exported one. Raises NotFoundError, CorruptionError (manifest).
    """
    try:
        return load_snapshot(home.snapshots, snapshot_of(home, what))
    except NotFoundError:
        folder = Path(what).expanduser()
        if not what or not folder.is_dir():
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
