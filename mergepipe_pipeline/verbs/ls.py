"""The verbs `ls` and `sql`: what a warehouse holds, as lists for people and as views for queries.

`ls` names what is damaged. `sql` brings the rows that are in no Parquet file; how queries are
answered is in `catalog.queries`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.queries import Limits, Rows
from mergepipe_pipeline.catalog.views import VIEWS
from mergepipe_pipeline.deploy.inbox import arrivals_at_fault
from mergepipe_pipeline.domain.selector import Selected, by_expert
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.execution.lookup import provenance_of, stored_plans
from mergepipe_pipeline.facts.quarantine import is_quarantined, kept_out, quarantined_names
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.quality.measure import evaluations_of
from mergepipe_pipeline.snapshots.find import list_snapshots, scan_snapshots
from mergepipe_pipeline.snapshots.stores import Marks, RefStore
from mergepipe_pipeline.storage.forms import record_of
from mergepipe_pipeline.text import escaped
from mergepipe_pipeline.warehouse import Warehouse

Row = TypeVar("Row")
#: What a snapshot's plan allowed, planned and could have read of the experts; tools have no plan.
_BYTES = ("budget_bytes", "expert_bytes_planned", "expert_bytes_total")
_LOG = logging.getLogger("mergepipe")
_Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """The contents of a warehouse, as rows for people and machines.

    Rows of `checkpoints` have `pack_nbytes` of the largest pack, if there is one, and where `pack
    --replace` moved the files. Snapshots come in the order of their time.
    Rows of `quarantined` have an expert's name and the decisions about its contents that are kept
    out; `is_now`: the registered one is. Rows of `damaged` have the kind (arrival, checkpoint,
    pack, quarantine, snapshot, ref), the name and the reason.
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
    for name, fault in arrivals_at_fault(warehouse).items():
        damaged.add("arrival", name, fault)
    kept_out_of = partial(_kept_out, warehouse)
    decided = damaged.rows("quarantine", quarantined_names(warehouse), kept_out_of)
    packs = damaged.rows("pack", warehouse.packs.ids(), warehouse.packs.open)
    of_snapshot = partial(_snapshot_row, warehouse, {s.snapshot_id: s for s in whole}, refused)
    snapshots = damaged.rows("snapshot", [s.snapshot_id for s in whole], of_snapshot)
    return Listing(
        damaged.rows("checkpoint", catalog.names(), partial(_checkpoint_row, warehouse, packs)),
        tuple(sorted(snapshots, key=lambda row: str(row["created"]))),
        damaged.rows("ref", refs.names(), partial(_ref_row, refs)),
        tuple(damaged.listed),
        tuple(row for row in decided if row["contents"]),
    )


class _Damaged:
    """Collects what cannot be listed, so that it hides nothing else."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []

    def add(self, kind: str, name: str, error: MergePipeError | str) -> None:
        """Remember one."""
        row = {"kind": kind, "name": name, "reason": str(error)}
        self.listed.append({k: escaped(v) for k, v in row.items()})

    def rows(
        self, kind: str, names: Iterable[str], row_of: Callable[[str], Row]
    ) -> tuple[Row, ...]:
        """The rows that `row_of` can give."""
        rows = []
        for name in names:
            try:
                rows.append(row_of(name))
            except MergePipeError as error:
                self.add(kind, name, error)
        return tuple(rows)


def _checkpoint_row(warehouse: Warehouse, packs: Sequence[Pack], name: str) -> dict[str, Any]:
    catalog = warehouse.catalog
    r = catalog.get(name)
    digests = catalog.digests(r.checkpoint.checkpoint_id)
    moved = warehouse.offline.find(r.checkpoint.checkpoint_id)
    return {
        "name": r.name,
        "version": r.version,
        "base": r.base,
        "tags": sorted(catalog.tags(name)),
        "tensors": len(r.checkpoint.tensors),
        "nbytes": r.checkpoint.nbytes,
        "analysed": digests is not None,
        "pack_nbytes": max((p.nbytes for p in packs if digests and p.holds(digests)), default=None),
        "root": r.checkpoint.root,
        "moved_to": moved.cold if moved is not None and moved.is_offline else None,
    }


def _snapshot_row(
    warehouse: Warehouse,
    snapshots: Mapping[str, Snapshot],
    refused: Mapping[str, str],
    snapshot_id: str,
) -> dict[str, Any]:
    snapshot = snapshots[snapshot_id]
    measured = evaluations_of(warehouse, snapshot_id)
    made = provenance_of(snapshot)
    return {
        "snapshot_id": snapshot_id,
        "created": made["created"],
        "recipe": made.get("recipe_name"),
        **{key: made.get("estimates", {}).get(key) for key in _BYTES},
        "method": snapshot.manifest.method,
        "nbytes": sum(x.nbytes for x in snapshot.manifest.shards),
        "inputs": [i.name for i in snapshot.manifest.inputs],
        "path": snapshot.path,
        "evaluations": [
            {"evaluator": e.evaluator, "metrics": dict(e.metrics), "measured": e.created}
            for e in measured
        ],
        "refused": refused.get(snapshot_id),
    }


def _ref_row(refs: RefStore, name: str) -> dict[str, Any]:
    r = refs.current(name)
    return {"ref": r.name, "version": r.number, "snapshot_id": r.snapshot_id, "reason": r.reason}


def _kept_out(warehouse: Warehouse, name: str) -> dict[str, Any]:
    contents = [
        {"content": d.content, "reason": escaped(d.reason), "decided": d.decided, "by": d.by}
        for d in kept_out(warehouse, name)
    ]
    return {"name": name, "contents": contents, "is_now": is_quarantined(warehouse, name)}


def query(
    warehouse: Warehouse, sql: str, limits: Limits | None = None
) -> tuple[list[str], list[_Row]]:
    """Column names and rows of a query. Raises MergePipeError for a query that cannot be answered.

    Plans and snapshots are read only if the query names their views.
    """
    return warehouse.catalog.sql(sql, rows_of(warehouse), limits)


def export(warehouse: Warehouse, target: Path) -> None:
    """Write all views as tables of a new DuckDB file.

    Raises MergePipeError if it exists or the views cannot be read.
    """
    warehouse.catalog.export(target, rows_of(warehouse))


def rows_of(warehouse: Warehouse) -> Rows:
    """How to get the rows of the views that are not the catalog's own."""
    return {
        "plans": partial(_plans, warehouse),
        "snapshots": partial(_snapshot_rows, warehouse),
        "snapshot_inputs": partial(_snapshot_inputs, warehouse),
        "refs": partial(_ref_rows, warehouse),
    }


def _row(view: str, *known: Mapping[str, Any], **given: Any) -> _Row:
    """The values of a view's columns; the last that is known under a name."""
    values = {key: value for source in (*known, given) for key, value in source.items()}
    return tuple(map(values.get, VIEWS[view].columns))


def _plans(warehouse: Warehouse) -> Iterator[_Row]:
    def row(plan_id: str, plan: Any) -> _Row:
        recipe = plan["recipe_name"]
        return _row("plans", plan, plan["estimates"], plan_id=plan_id, recipe=recipe)

    for _, of_plan in stored_plans(warehouse, row):
        yield of_plan


def _snapshot_rows(warehouse: Warehouse) -> Iterator[_Row]:
    for snapshot, stored in _with_provenance(warehouse):
        realised, manifest = stored.get("realised") or {}, snapshot.manifest
        yield _row(
            "snapshots",
            stored,
            realised,
            stored.get("estimates") or {},
            snapshot_id=snapshot.snapshot_id,
            recipe=stored["recipe_name"],
            method=manifest.method,
            plan_id=manifest.plan_id,
            nbytes=sum(shard.nbytes for shard in manifest.shards),
            seconds=realised.get("layers_s"),
        )


def _snapshot_inputs(warehouse: Warehouse) -> Iterator[_Row]:
    versions = _first_versions(warehouse.catalog)
    for snapshot, stored in _with_provenance(warehouse):
        selected = stored.get("request", {}).get("selected", ())
        selectors = by_expert(record_of(Selected, s) for s in selected)
        for entry, source in zip(snapshot.manifest.inputs, stored["sources"], strict=True):
            yield _row(
                "snapshot_inputs",
                source,
                asdict(entry),
                snapshot_id=snapshot.snapshot_id,
                version=versions.get((entry.name, source["checkpoint_id"])),
                selector=selectors.get(entry.name),
            )


def _ref_rows(warehouse: Warehouse) -> Iterator[_Row]:
    refs = warehouse.refs
    for name in refs.names():
        try:
            history = refs.history(name)
        except MergePipeError:  # `ls` says so
            continue
        for ref in history:
            yield (name, ref.number, ref == history[-1], ref.snapshot_id, ref.reason)


def _first_versions(catalog: Catalog) -> dict[tuple[str, str], int]:
    """(Name, checkpoint id) to the first version of the name that has it."""
    versions: dict[tuple[str, str], int] = {}
    for name, version, checkpoint_id, *_ in catalog.registrations():
        versions.setdefault((name, checkpoint_id), version)
    return versions


def _with_provenance(warehouse: Warehouse) -> Iterator[tuple[Snapshot, dict[str, Any]]]:
    """All snapshots with their provenance, by id; damaged ones are said and left out."""
    for snapshot in list_snapshots(warehouse.snapshots):
        try:
            stored = provenance_of(snapshot)
        except (CorruptionError, OSError) as error:
            _LOG.warning("A snapshot is left out: %s", error)
            continue
        yield snapshot, stored
