"""SQL over the catalog: every documented view answers, and mistakes are explained."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.queries import Rows
from mergepipe_pipeline.catalog.views import FILES, VIEWS
from mergepipe_pipeline.errors import MergePipeError
from tests.catalog.facts import checkpoint, put_contents, some_stats

ROWS = {
    "registrations": 2,
    "tensors": 4,
    "digests": 1,
    "tensor_stats": 2,
    "tensor_histograms": 2,
    "block_stats": 6,
    "block_samples": 6,
    "facts": 2,
    "plans": 0,
    "snapshots": 0,
    "snapshot_inputs": 0,
    "refs": 1,
}
REFS: Rows = {"refs": lambda: [("prod", 1, True, "0" * 32, "first")]}


@pytest.fixture
def empty(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "it's a catalog")


@pytest.fixture
def filled(empty: Catalog) -> Catalog:
    empty.register(checkpoint(mtime_ns=1), None)
    empty.register(checkpoint(mtime_ns=2), "base")
    put_contents(empty, "d" * 24, w="0")
    facts = empty.facts("b" * 24, "c" * 24)
    facts.put_stats(some_stats())
    facts.put_fact("trim-0.2", {"w": (1, 2, 0.0), "v": (3, 4, 0.0)})
    return empty


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_answers_on_an_empty_catalog(empty: Catalog, view: str) -> None:
    columns, rows = empty.sql(f"SELECT * FROM {view}")
    assert columns
    assert rows == []


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_answers_on_a_filled_catalog(filled: Catalog, view: str) -> None:
    assert len(filled.sql(f"SELECT * FROM {view}", REFS)[1]) == ROWS[view]


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_has_exactly_its_documented_columns(
    empty: Catalog, filled: Catalog, view: str
) -> None:
    columns = list(VIEWS[view].columns)
    assert empty.sql(f"SELECT * FROM {view}")[0] == columns
    assert filled.sql(f"SELECT * FROM {view}", REFS)[0] == columns
    assert all(VIEWS[view].columns.values())


def test_every_column_of_every_file_is_in_some_view() -> None:
    kept = {"coarse", "fine", "entries", "bits", "counts"}  # for reads and thresholds alone
    for name, files in FILES.items():
        views = [v for v in VIEWS.values() if v.source == name]
        told = {v.of_lists.get(c, c) for v in views for c in v.columns}
        assert told - {"range(len(block_l2sq))"} == set(files.columns.names) - kept


def test_statistics_of_two_passes_and_facts_of_a_group_are_in_one_view(filled: Catalog) -> None:
    filled.facts("b" * 24, "c" * 24).put_stats(some_stats(names=["u"], blocks=5))
    filled.facts("b" * 24, "group-0123").put_fact("gram-delta", {"w": (0.5,) * 9})
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


def test_a_damaged_file_is_said_and_left_out_of_a_query_that_names_its_view(
    filled: Catalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_contents(filled, "e" * 24, w="1")
    (path,) = tmp_path.rglob(f"contents/v1/{'d' * 24}.*.parquet")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"w", b"v", 1))
    assert filled.sql("SELECT count(*) FROM tensors")[1] == [(4,)]
    assert caplog.messages == []
    assert filled.sql("SELECT checkpoint_id FROM digests")[1] == [("e" * 24,)]
    assert [str(path) in m for m in caplog.messages] == [True]


SECRET = "'/etc/passwd'"
WRITING = [
    "COPY (SELECT 1) TO '{}'",
    "WITH x AS (COPY (SELECT 1) TO '{}') SELECT 1",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{}'",
    "SELECT * FROM query('COPY (SELECT 1) TO ''{}''')",
    "ATTACH '{}'",
    "EXPORT DATABASE '{}'",
    "SELECT 1; COPY (SELECT 1) TO '{}'",
]
HOSTILE = [
    f"SELECT * FROM read_csv({SECRET})",
    f"SELECT * FROM read_text({SECRET})",
    f"SELECT * FROM read_blob({SECRET})",
    f"SELECT * FROM sniff_csv({SECRET})",
    "FROM '/etc/passwd'",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM parquet_metadata('*.parquet')",
    "SELECT * FROM read_json('https://example.org/x.json')",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "RESET lock_configuration",
    "PRAGMA database_list",
    "CREATE TABLE t AS SELECT 1",
    "CALL pragma_version()",
    "INSERT INTO refs_rows VALUES (1)",
    "DROP VIEW refs",
    "SELECT * FROM secret",
    "SELECT * FROM query('ATTACH ''x''')",
]


@pytest.mark.parametrize("query", WRITING)
def test_no_query_can_write_a_file_not_even_into_the_catalog(
    filled: Catalog, tmp_path: Path, query: str
) -> None:
    folder = next(tmp_path.rglob("contents/v1"))
    before = sorted(tmp_path.rglob("*"))
    for target in (folder / "new.parquet", next(folder.iterdir())):
        with pytest.raises(MergePipeError, match=r"query failed.*SQL over the views"):
            filled.sql(query.format(target))
    assert sorted(tmp_path.rglob("*")) == before
    assert len(filled.sql("SELECT * FROM digests")[1]) == ROWS["digests"]


@pytest.mark.parametrize("query", HOSTILE)
def test_no_query_can_read_a_file_change_a_setting_or_load_code(
    filled: Catalog, query: str
) -> None:
    secret = duckdb.values([1])
    assert secret is not None
    with pytest.raises(MergePipeError, match=r"query failed.*SQL over the views"):
        filled.sql(query)


def test_what_would_change_something_is_told_apart_from_what_is_wrong(filled: Catalog) -> None:
    with pytest.raises(MergePipeError, match="COPY where only SELECT is answered"):
        filled.sql("COPY digests TO 'x.parquet'")
    with pytest.raises(MergePipeError, match='Did you mean "digests'):
        filled.sql("SELECT * FROM digest")


@pytest.mark.parametrize(
    "query",
    [
        "SHOW TABLES",
        "DESCRIBE digests",
        "SUMMARIZE digests",
        "EXPLAIN SELECT * FROM digests",
        "FROM digests",
        "VALUES (1)",
        "WITH d AS (FROM digests) SELECT count(*) FROM d",
        "PIVOT block_stats ON tensor USING sum(l2sq)",
        "SELECT * FROM digests -- a remark",
    ],
)
def test_whatever_only_reads_is_answered(filled: Catalog, query: str) -> None:
    assert filled.sql(query)[1]


def test_exact_numbers_come_as_plain_ones(filled: Catalog) -> None:
    (row,) = filled.sql("SELECT sum(nonzero), 1.5, 2.0, sum(l2sq) > 0 FROM block_stats")[1]
    assert [type(v) for v in row] == [int, float, int, bool]


def test_rows_are_asked_for_only_by_a_query_that_names_them(filled: Catalog) -> None:
    def rows() -> list[tuple[object, ...]]:
        raise AssertionError("asked")

    assert filled.sql("SELECT count(*) FROM digests", {"plans": rows})[1] == [(1,)]
    with pytest.raises(AssertionError, match="asked"):
        filled.sql("SELECT count(*) FROM PLANS", {"plans": rows})


def test_a_view_may_be_used_twice_in_a_query(filled: Catalog) -> None:
    query = "SELECT count(*) FROM refs a JOIN refs b USING (ref)"
    assert filled.sql(query, REFS)[1] == [(1,)]


def test_an_export_is_a_duckdb_file_with_all_views(filled: Catalog, tmp_path: Path) -> None:
    target = tmp_path / "o'ut.duckdb"
    filled.export(target, REFS)
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


def test_an_export_leaves_out_a_damaged_file(filled: Catalog, tmp_path: Path) -> None:
    (path,) = tmp_path.rglob("contents/v1/*.parquet")
    path.write_bytes(b"junk")
    filled.export(tmp_path / "out.duckdb")
    with duckdb.connect(str(tmp_path / "out.duckdb"), read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM digests").fetchall() == [(0,)]


def test_an_export_that_fails_leaves_no_file(filled: Catalog, tmp_path: Path) -> None:
    def rows() -> list[tuple[object, ...]]:
        raise duckdb.Error("no rows")

    with pytest.raises(MergePipeError, match=r"cannot be exported.*no rows"):
        filled.export(tmp_path / "out.duckdb", {"plans": rows})
    assert [p.name for p in tmp_path.iterdir() if "duckdb" in p.name] == []
