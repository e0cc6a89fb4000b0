"""The verbs `sql` and its export: the catalog's views together with plans, snapshots and refs.

Brings the rows that are in no Parquet file; how queries are answered is in `catalog.queries`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.queries import Limits, Rows
from mergepipe_pipeline.domain.selector import Selected, by_expert
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.execution.lookup import provenance_of, stored_plans
from mergepipe_pipeline.snapshots.find import list_snapshots
from mergepipe_pipeline.storage.forms import record_of
from mergepipe_pipeline.warehouse import Warehouse

_LOG = logging.getLogger("mergepipe")
_Row = tuple[Any, ...]


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
        "snapshots": partial(_snapshots, warehouse),
        "snapshot_inputs": partial(_snapshot_inputs, warehouse),
        "refs": partial(_refs, warehouse),
    }


def _plans(warehouse: Warehouse) -> Iterator[_Row]:
    for _, row in stored_plans(warehouse, _plan_row):
        yield row


def _plan_row(plan_id: str, plan: Any) -> _Row:
    e = plan["estimates"]
    return (
        plan_id,
        plan["recipe_name"],
        plan["method"],
        e["strategy"],
        plan["ref"],
        e["budget_bytes"],
        e["expert_bytes_total"],
        e["expert_bytes_planned"],
        e["blocks_total"],
        e["blocks_bought"],
        e["blocks_zero"],
        e.get("reads"),
        e.get("predicted_error"),
        e["error_bound"],
        e["update_norm"],
    )


def _snapshots(warehouse: Warehouse) -> Iterator[_Row]:
    for snapshot, stored in _with_provenance(warehouse):
        e, realised = stored["estimates"], stored["realised"] or {}
        yield (
            snapshot.snapshot_id,
            stored["created"],
            stored["recipe_name"],
            stored["ref"],
            snapshot.manifest.method,
            snapshot.manifest.plan_id,
            e["strategy"],
            sum(shard.nbytes for shard in snapshot.manifest.shards),
            e["budget_bytes"],
            e["expert_bytes_total"],
            e["expert_bytes_planned"],
            realised.get("expert_bytes_read"),
            e["error_bound"],
            realised.get("layers_s"),
        )


def _snapshot_inputs(warehouse: Warehouse) -> Iterator[_Row]:
    versions = _first_versions(warehouse.catalog)
    for snapshot, stored in _with_provenance(warehouse):
        sources, selected = stored["sources"], stored.get("request", {}).get("selected", ())
        selectors = by_expert(record_of(Selected, s) for s in selected)
        for entry, source in zip(snapshot.manifest.inputs, sources, strict=True):
            checkpoint_id = source["checkpoint_id"]
            yield (
                snapshot.snapshot_id,
                entry.role,
                entry.name,
                versions.get((entry.name, checkpoint_id)),
                checkpoint_id,
                entry.content_sha256,
                source["root"],
                selectors.get(entry.name),
            )


def _refs(warehouse: Warehouse) -> Iterator[_Row]:
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
