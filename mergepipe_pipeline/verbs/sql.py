"""The verbs `sql` and its export: the catalog's views together with plans, snapshots and refs.

Brings the rows that are in no Parquet file; how queries are answered is in `catalog.queries`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.queries import Limits, Rows
from mergepipe_pipeline.catalog.views import VIEWS
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


def _snapshots(warehouse: Warehouse) -> Iterator[_Row]:
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
