"""Every SQL statement: documented views over the catalog's Parquet files, in a private DuckDB.

A DuckDB file would be locked by its first user; views over immutable files are not.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe_pipeline.catalog import tables
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.storage.atomic import adopt_file, remove_tree

if TYPE_CHECKING:
    import duckdb

#: What each view holds, one row per what.
VIEWS = {
    "registrations": "one row per name and version: name, version, checkpoint_id, base, root",
    "tensors": "one row per tensor: checkpoint_id, tensor, dtype, shape, file, nbytes",
    "digests": "one row per tensor whose content is known: checkpoint_id, tensor, sha256",
    "tensor_stats": "one row per tensor of an analysed expert: base_id, checkpoint_id, l1, l2sq, …",
    "block_stats": "one row per block: base_id, checkpoint_id, block_elems, tensor, block, l2sq, …",
    "facts": "one row per fact of a tensor: base_id, checkpoint_id or group, key, tensor, numbers",
}

_PARQUET = {
    "tensors": (
        tables.TENSORS,
        "checkpoints/*.parquet",
        "regexp_extract(filename, '([^/]+)\\.parquet$', 1) AS checkpoint_id",
    ),
    "digests": (
        tables.DIGESTS,
        "digests/*.parquet",
        "regexp_extract(filename, '([^/]+)\\.parquet$', 1) AS checkpoint_id",
    ),
    "tensor_stats": (
        tables.TENSOR_STATS,
        "block_stats/v2/*/*.tensors.parquet",
        "regexp_extract(filename, '([^/]+)/([^/.]+)\\.b(\\d+)', 1) AS base_id, "
        "regexp_extract(filename, '([^/]+)/([^/.]+)\\.b(\\d+)', 2) AS checkpoint_id, "
        "regexp_extract(filename, '\\.b(\\d+)\\.', 1)::BIGINT AS block_elems",
    ),
    "block_stats": (
        tables.BLOCK_STATS,
        "block_stats/v2/*/*.blocks.parquet",
        "regexp_extract(filename, '([^/]+)/([^/.]+)\\.b(\\d+)', 1) AS base_id, "
        "regexp_extract(filename, '([^/]+)/([^/.]+)\\.b(\\d+)', 2) AS checkpoint_id, "
        "regexp_extract(filename, '\\.b(\\d+)\\.', 1)::BIGINT AS block_elems",
    ),
    "facts": (
        tables.FACTS,
        "tensor_facts/v2/*/*/*.parquet",
        "regexp_extract(filename, '([^/]+)/([^/]+)/([^/]+)\\.[^.]+\\.parquet$', 1) AS base_id, "
        "regexp_extract(filename, '([^/]+)/([^/]+)/([^/]+)\\.[^.]+\\.parquet$', 2) "
        "AS checkpoint_id, "
        "regexp_extract(filename, '([^/]+)/([^/]+)/([^/]+)\\.[^.]+\\.parquet$', 3) AS key",
    ),
}
Registrations = Sequence[tuple[str, int, str, str | None, str]]


def connect(folder: Path, registrations: Registrations) -> duckdb.DuckDBPyConnection:
    """An in-memory database with all views; a view without files yet is an empty table."""
    import duckdb

    connection = duckdb.connect(":memory:")
    for name, (schema, pattern, columns) in _PARQUET.items():
        if any(folder.glob(pattern)):
            path = str(folder / pattern).replace("'", "''")
            rows = f"read_parquet('{path}', filename = true)"
        else:
            connection.register(f"no_{name}", schema.empty_table())
            rows = f"(SELECT *, '' AS filename FROM no_{name})"
        connection.execute(
            f"CREATE VIEW {name} AS SELECT * EXCLUDE (filename), {columns} FROM {rows}"
        )
    connection.execute(
        "CREATE TABLE registrations (name VARCHAR, version INTEGER, "
        "checkpoint_id VARCHAR, base VARCHAR, root VARCHAR)"
    )
    if registrations:
        connection.executemany(
            "INSERT INTO registrations VALUES (?, ?, ?, ?, ?)", [list(r) for r in registrations]
        )
    return connection


def run(
    folder: Path, registrations: Registrations, query: str
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of a query over the views.

    Raises MergePipeError for bad SQL and for a damaged file; an empty query has no columns.
    """
    import duckdb

    try:
        with connect(folder, registrations) as connection:
            result = connection.execute(query)
            # DuckDB answers a text without any statement with None.
            if result is None:
                return [], []
            return [d[0] for d in result.description or []], result.fetchall()
    except duckdb.Error as error:
        raise MergePipeError(
            "A query failed",
            where="sql",
            found=str(error),
            expected="SQL over the views " + ", ".join(VIEWS),
            next_step="run `mergepipe sql` without a query to see them",
        ) from error


def export(folder: Path, registrations: Registrations, target: Path) -> None:
    """Write all views as tables of a new DuckDB file at `target`.

    Raises MergePipeError if `target` exists or the views cannot be read.
    """
    import duckdb

    if target.exists():
        raise _no_export(target, "the file exists already", "choose another name, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with connect(folder, registrations) as connection:
            path = str(temp).replace("'", "''")
            connection.execute(f"ATTACH '{path}' AS out")
            for name in VIEWS:
                connection.execute(f"CREATE TABLE out.{name} AS SELECT * FROM {name}")
            connection.execute("DETACH out")
        adopt_file(temp, target)
    except duckdb.Error as error:
        raise _no_export(target, str(error), "delete or restore the file it names") from error
    finally:
        remove_tree(temp)


def _no_export(target: Path, found: str, next_step: str) -> MergePipeError:
    return MergePipeError(
        "The catalog cannot be exported",
        where=str(target),
        expected="a new file for a readable catalog",
        found=found,
        next_step=next_step,
    )
