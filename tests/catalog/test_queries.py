"""SQL over the catalog: every documented view answers, and mistakes are explained."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.queries import VIEWS
from mergepipe_pipeline.errors import MergePipeError
from tests.catalog.facts import checkpoint, some_stats

ROWS = {
    "registrations": 2,
    "tensors": 4,
    "digests": 1,
    "tensor_stats": 2,
    "block_stats": 6,
    "facts": 2,
}


@pytest.fixture
def empty(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "it's a catalog")


@pytest.fixture
def filled(empty: Catalog) -> Catalog:
    empty.register(checkpoint(mtime_ns=1), None)
    empty.register(checkpoint(mtime_ns=2), "base")
    empty.put_digests("d" * 24, {"w": "0"})
    empty.put_stats(some_stats())
    empty.put_fact("b" * 24, "c" * 24, "trim-0.2", {"w": (1, 2, 0.0), "v": (3, 4, 0.0)})
    return empty


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_answers_on_an_empty_catalog(empty: Catalog, view: str) -> None:
    columns, rows = empty.sql(f"SELECT * FROM {view}")
    assert columns
    assert rows == []


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_answers_on_a_filled_catalog(filled: Catalog, view: str) -> None:
    assert len(filled.sql(f"SELECT * FROM {view}")[1]) == ROWS[view]


def columns_of(text: str) -> list[str]:
    listed = text.partition(": ")[2].split(", ")
    return [c.split()[0] for c in listed if c != "…"]


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_has_its_documented_columns_empty_or_filled(tmp_path: Path, view: str) -> None:
    wanted = set(columns_of(VIEWS[view]))
    catalog = Catalog(tmp_path / "c")
    assert wanted <= set(catalog.sql(f"SELECT * FROM {view}")[0])
    catalog.register(checkpoint(), None)
    catalog.put_digests("d", {"w": "0"})
    catalog.put_stats(some_stats())
    catalog.put_fact("b", "c", "k", {"w": (1, 2, 0.0)})
    assert wanted <= set(catalog.sql(f"SELECT * FROM {view}")[0])


def test_statistics_of_two_passes_and_facts_of_a_group_are_in_one_view(filled: Catalog) -> None:
    filled.put_stats(some_stats(names=["u"], blocks=5))
    filled.put_fact("b" * 24, "group-0123", "gram-delta", {"w": (0.5,) * 9})
    assert filled.sql("SELECT tensor, base_tensor FROM tensor_stats ORDER BY 1")[1] == [
        (name, name) for name in "uvw"
    ]
    assert filled.sql(
        "SELECT tensor, count(*) FROM block_stats WHERE block_elems = 4096 GROUP BY 1 ORDER BY 1"
    )[1] == [("u", 5), ("v", 3), ("w", 3)]
    assert filled.sql(
        "SELECT base_id, key, len(numbers) FROM facts WHERE checkpoint_id = 'group-0123'"
    )[1] == [("b" * 24, "gram-delta", 9)]


def test_views_know_whose_facts_they_hold(filled: Catalog) -> None:
    ids = ("b" * 24, "c" * 24)
    for view in ("tensor_stats", "block_stats"):
        rows = filled.sql(f"SELECT DISTINCT base_id, checkpoint_id, block_elems FROM {view}")[1]
        assert rows == [(*ids, 4096)]
    assert filled.sql("SELECT DISTINCT base_id, checkpoint_id, key FROM facts")[1] == [
        (*ids, "trim-0.2")
    ]
    assert filled.sql("SELECT tensor, numbers FROM facts ORDER BY tensor")[1] == [
        ("v", [3.0, 4.0, 0.0]),
        ("w", [1.0, 2.0, 0.0]),
    ]
    assert filled.sql(
        "SELECT r.version, count(*) FROM registrations r JOIN tensors USING (checkpoint_id) "
        "GROUP BY 1 ORDER BY 1"
    )[1] == [(1, 2), (2, 2)]


@pytest.mark.parametrize("query", ["SELEKT 1", "SELECT * FROM nothing", "SELECT 1/'x'", ""])
def test_bad_sql_is_explained_with_the_views(filled: Catalog, query: str) -> None:
    if not query:
        assert filled.sql(query) == ([], [])
        return
    with pytest.raises(MergePipeError, match=r"query failed.*registrations, tensors"):
        filled.sql(query)


def test_a_damaged_file_makes_a_query_fail_cleanly(filled: Catalog, tmp_path: Path) -> None:
    (path,) = tmp_path.rglob("digests/*.parquet")
    path.write_bytes(b"junk")
    with pytest.raises(MergePipeError, match=path.name):
        filled.sql("SELECT * FROM digests")


def test_an_export_is_a_duckdb_file_with_all_views(filled: Catalog, tmp_path: Path) -> None:
    target = tmp_path / "o'ut.duckdb"
    filled.export(target)
    with duckdb.connect(str(target), read_only=True) as connection:
        counts = {
            view: connection.execute(f"SELECT count(*) FROM {view}").fetchall()[0][0]
            for view in VIEWS
        }
    assert counts == ROWS


def test_exporting_over_an_existing_file_is_refused(filled: Catalog, tmp_path: Path) -> None:
    target = tmp_path / "out.duckdb"
    filled.export(target)
    with pytest.raises(MergePipeError, match=r"out\.duckdb"):
        filled.export(target)


def test_an_export_that_fails_leaves_no_file(filled: Catalog, tmp_path: Path) -> None:
    (path,) = tmp_path.rglob("digests/*.parquet")
    path.write_bytes(b"junk")
    with pytest.raises(MergePipeError, match=f"cannot be exported.*{path.name}"):
        filled.export(tmp_path / "out.duckdb")
    assert [p.name for p in tmp_path.iterdir() if "duckdb" in p.name] == []
