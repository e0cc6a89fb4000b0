"""A query has an end: in time, in memory, in rows; and no statement of DuckDB's gets around it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.queries import Limits
from mergepipe_pipeline.errors import MergePipeError

ENDLESS = "SELECT sum(a.range * b.range) FROM range(1000000000) a, range(1000000000) b"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path)


@pytest.mark.parametrize("query", [ENDLESS, ENDLESS.replace("sum(a.range * b.range)", "*")])
def test_a_query_that_does_not_end_is_interrupted(catalog: Catalog, query: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(MergePipeError, match="A query needs too much time"):
        catalog.sql(query, limits=Limits(timeout_s=0.3, rows=1 << 60))
    assert time.monotonic() - began_s < 20


def test_a_query_that_needs_too_much_memory_is_refused(catalog: Catalog) -> None:
    query = "SELECT list(range) FROM range(100000000)"
    with pytest.raises(MergePipeError, match="too much memory") as caught:
        catalog.sql(query, limits=Limits(memory_nbytes=32 << 20))
    assert "--memory" in str(caught.value)


def test_a_query_with_too_many_rows_is_refused(catalog: Catalog) -> None:
    with pytest.raises(MergePipeError) as caught:
        catalog.sql("SELECT * FROM range(30000)", limits=Limits(rows=20_000))
    assert "more than 20000 rows" in str(caught.value)
    assert len(catalog.sql("SELECT * FROM range(20000)", limits=Limits(rows=20_000))[1]) == 20_000


@pytest.mark.parametrize(
    "query",
    [
        "UPDATE EXTENSIONS",
        "SELECT 1; UPDATE EXTENSIONS",
        "INSTALL httpfs",
        "LOAD httpfs",
        "PRAGMA database_list",
        "ATTACH ':memory:' AS x",
        "COPY (SELECT 1) TO 'x'",
        "CALL range(3)",
        "CHECKPOINT",
        "VACUUM",
        "PREPARE a AS SELECT 1",
        "BEGIN",
        "SET threads = 99",
        "EXPORT DATABASE 'x'",
    ],
)
def test_a_statement_that_does_not_select_is_refused(catalog: Catalog, query: str) -> None:
    with pytest.raises(MergePipeError) as caught:
        catalog.sql(query)
    assert "where only SELECT is answered" in str(caught.value)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT DATE '290000-01-01'",
        "SELECT 'infinity'::timestamp",
        "SELECT INTERVAL '999999999' YEAR",
        "SELECT 'a' || chr(0)",
        "SELECT * FROM query('UPDATE EXTENSIONS')",
        "SELECT union_value(a := 1), MAP {1: 2}, '1 day'::interval, uuid()",
    ],
)
def test_odd_values_are_answered_or_refused(catalog: Catalog, query: str) -> None:
    with suppress(MergePipeError):
        catalog.sql(query)
