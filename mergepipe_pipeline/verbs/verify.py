"""The verb `verify`: every byte of a snapshot is what was written; `--all`: of a warehouse.

It writes nothing, so that the warehouse may be one that cannot be written.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.catalog.seals import untouched
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.execution.lookup import snapshot_named
from mergepipe_pipeline.integrity.auditor import SCOPES, Auditor, Finding, Scope
from mergepipe_pipeline.integrity.inputs import verify_inputs
from mergepipe_pipeline.integrity.packs import verify_frames, verify_indexes
from mergepipe_pipeline.integrity.records import verify_lineage, verify_structure
from mergepipe_pipeline.integrity.results import report_shards, verify_digests
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.commit import Verification, verify_with_progress
from mergepipe_pipeline.warehouse import Warehouse


def verify(warehouse: Warehouse, what: str, progress: Progress | None = None) -> Verification:
    """Re-hash every byte of a snapshot, given by id, unique prefix, ref, `REF@VERSION`, or folder.

    The folder may be one that `--out` wrote, wherever it lies.
    Raises CorruptionError naming the file and tensor that is wrong, NotFoundError for an unknown
    name.
    """
    snapshot = snapshot_named(warehouse, what)
    is_copy = Path(snapshot.path).parent != warehouse.snapshots
    return verify_with_progress(snapshot, progress, is_copy=is_copy)


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a verification; `nbytes` were hashed and found right."""

    scopes: tuple[Scope, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    files: int
    nbytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


def verify_all(
    warehouse: Warehouse,
    scopes: Collection[Scope] = SCOPES,
    *,
    inputs_of: Snapshot | None = None,
    progress: Progress | None = None,
) -> Report:
    """Look at all of a warehouse in these scopes; changes nothing.

    `inputs_of` restricts the inputs to those of one snapshot.
    """
    wanted = tuple(s for s in SCOPES if s in scopes)
    audit, shown = Auditor(), progress or Silent()
    with untouched():
        if "structure" in scopes:
            verify_structure(warehouse, audit)
            verify_indexes(warehouse, audit)
        if "lineage" in scopes:
            verify_lineage(warehouse, audit)
        if "digests" in scopes:
            verify_digests(warehouse, audit, shown)
            report_shards(warehouse, audit)
            verify_frames(warehouse, audit, shown)
        if "inputs" in scopes:
            verify_inputs(warehouse, audit, shown, inputs_of)
    ordered = sorted(audit.findings, key=lambda f: (SCOPES.index(f.scope), f.where))
    return Report(wanted, tuple(ordered), tuple(audit.notes), audit.files, audit.nbytes)
