"""The verb `ls`: what a warehouse holds, damaged records among it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.contents.quarantine import is_quarantined, kept_out, quarantined_names
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.evaluation.store import evaluations_of
from mergepipe_pipeline.snapshots.find import scan_snapshots
from mergepipe_pipeline.snapshots.marks import Marks
from mergepipe_pipeline.snapshots.refs import RefStore
from mergepipe_pipeline.spec.snapshot import Snapshot
from mergepipe_pipeline.text import escaped
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Listing:
    """What a warehouse holds, as rows for people and machines.

    Rows of `quarantined` have an expert's name and the decisions about its contents that are kept
    out; `is_now`: the registered one is. Rows of `damaged` have the kind (checkpoint, quarantine,
    snapshot, ref), the name and the reason.
    """

    checkpoints: tuple[dict[str, Any], ...]
    snapshots: tuple[dict[str, Any], ...]
    refs: tuple[dict[str, Any], ...]
    damaged: tuple[dict[str, Any], ...] = ()
    quarantined: tuple[dict[str, Any], ...] = ()


def ls(warehouse: Warehouse) -> Listing:
    """Registered checkpoints, snapshots and refs; what is damaged is listed as damaged."""
    catalog, refs, damaged = warehouse.catalog, warehouse.refs, _Damaged()
    whole, broken = scan_snapshots(warehouse.snapshots)
    refused = Marks(warehouse.stages).refusals()
    for snapshot in broken:
        damaged.add("snapshot", snapshot.folder.name, snapshot.error)
    kept_out_of = partial(_kept_out, warehouse)
    decided = damaged.rows("quarantine", quarantined_names(warehouse), kept_out_of)
    return Listing(
        damaged.rows("checkpoint", catalog.names(), partial(_checkpoint_row, catalog)),
        tuple(_snapshot_row(warehouse, s, refused) for s in whole),
        damaged.rows("ref", refs.names(), partial(_ref_row, refs)),
        tuple(damaged.found),
        tuple(row for row in decided if row["contents"]),
    )


class _Damaged:
    """Collects what cannot be told, so that it hides nothing else."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def add(self, kind: str, name: str, error: MergePipeError) -> None:
        """Remember one."""
        told = {"kind": kind, "name": name, "reason": str(error)}
        self.found.append({k: escaped(v) for k, v in told.items()})

    def rows(
        self, kind: str, names: Iterable[str], row_of: Callable[[str], dict[str, Any]]
    ) -> tuple[dict[str, Any], ...]:
        """The rows that `row_of` can give."""
        rows = []
        for name in names:
            try:
                rows.append(row_of(name))
            except MergePipeError as error:
                self.add(kind, name, error)
        return tuple(rows)


def _checkpoint_row(catalog: Catalog, name: str) -> dict[str, Any]:
    r = catalog.get(name)
    return {
        "name": r.name,
        "version": r.version,
        "base": r.base,
        "tags": sorted(catalog.tags(name)),
        "tensors": len(r.checkpoint.tensors),
        "nbytes": r.checkpoint.nbytes,
        "analysed": catalog.digests(r.checkpoint.checkpoint_id) is not None,
        "root": r.checkpoint.root,
    }


def _snapshot_row(
    warehouse: Warehouse, snapshot: Snapshot, refused: Mapping[str, str]
) -> dict[str, Any]:
    measured = evaluations_of(warehouse, snapshot.snapshot_id)
    return {
        "snapshot_id": snapshot.snapshot_id,
        "method": snapshot.manifest.method,
        "nbytes": sum(x.nbytes for x in snapshot.manifest.shards),
        "inputs": [i.name for i in snapshot.manifest.inputs],
        "path": snapshot.path,
        "evaluations": [
            {"evaluator": e.evaluator, "metrics": dict(e.metrics), "measured": e.created}
            for e in measured
        ],
        "refused": refused.get(snapshot.snapshot_id),
    }


def _ref_row(refs: RefStore, name: str) -> dict[str, Any]:
    r = refs.current(name)
    return {"ref": r.name, "version": r.number, "snapshot_id": r.snapshot_id, "reason": r.reason}


def _kept_out(warehouse: Warehouse, name: str) -> dict[str, Any]:
    contents = [
        {"content": d.content, "reason": escaped(d.reason), "decided": d.decided}
        for d in kept_out(warehouse, name)
    ]
    return {"name": name, "contents": contents, "is_now": is_quarantined(warehouse, name)}
