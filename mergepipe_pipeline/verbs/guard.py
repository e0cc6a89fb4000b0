"""What a snapshot holds of contents in quarantine, and the refs that these never get.

A ref is guarded where a standing recipe with a gate releases under it: a verdict on an expert
counts there, whoever publishes.
"""

from __future__ import annotations

from mergepipe_pipeline.deploy.recipe_files import standing_recipes
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import GateError
from mergepipe_pipeline.execution.lookup import request_of
from mergepipe_pipeline.facts.quarantine import Quarantine, kept_out, quarantined_names
from mergepipe_pipeline.warehouse import Warehouse


def kept_out_in(warehouse: Warehouse, snapshot: Snapshot) -> tuple[Quarantine, ...]:
    """The quarantined contents that a snapshot was merged from, at present.

    Raises CorruptionError where a decision or the snapshot's provenance cannot be read.
    """
    if not (decided := set(quarantined_names(warehouse))):
        return ()
    # It loads pyarrow, which few releases need.
    from mergepipe_pipeline.quality.regression import contents_of

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
    kept_out = kept_out_in(warehouse, snapshot)
    if not kept_out or not (is_guarded or _is_guarded(warehouse, ref)):
        return
    raise GateError(
        "A snapshot was merged from what is in quarantine",
        where=f"snapshot {snapshot.snapshot_id[:16]}",
        expected=f"no such content under the ref {ref}, which a gate guards",
        found="; ".join(map(str, kept_out)),
        next_step="merge without it, or let it in; `mergepipe promote SNAPSHOT --ref REF --force "
        "REASON` publishes all the same",
    )


def _is_guarded(warehouse: Warehouse, ref: str) -> bool:
    return any(p.ref == ref and p.gate is not None for p in standing_recipes(warehouse))
