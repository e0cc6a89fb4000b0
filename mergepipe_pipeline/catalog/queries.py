"""Every SQL statement: the views of `views` in a private DuckDB that can touch no file.

A DuckDB file would be locked by its first user; immutable Parquet files are not. They are opened
here and handed in as Arrow datasets: a query can neither read nor write anything else, whatever it
says, since a list of allowed folders would let it write into them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mergepipe_pipeline.catalog.seals import is_good
from mergepipe_pipeline.catalog.views import FILES, VIEWS, Files, View
from mergepipe_pipeline.concurrency.threads import cores
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.storage.atomic import adopt_file, remove_tree

if TYPE_CHECKING:
    import duckdb
    import pyarrow.dataset as ds

#: By view without files: gives its rows. Called only for a query that names the view.
Rows = Mapping[str, Callable[[], Iterable[Sequence[Any]]]]

_READING = frozenset({"SELECT", "EXPLAIN", "MULTI"})
_LOCKED = {
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "temp_directory": "",
    "enable_external_access": False,
    "lock_configuration": True,
}


_AGAIN_S = 0.05
_BATCH_ROWS = 10_000
#: A query works with these at most.
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one query. `memory_nbytes` is DuckDB's; rows are limited beside it."""

    timeout_s: float = 60.0
    memory_nbytes: int = 1 << 30
    rows: int = 1_000_000


def run(
    folder: Path, rows: Rows, query: str, limits: Limits | None = None
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of a query over the views; exact numbers come as int or float.

    A damaged file is reported and left out. Raises MergePipeError for bad SQL, for a statement that
    would change something, and for a query beyond its limits; an empty query has no columns.
    """
    import duckdb

    limits = limits or Limits()
    query.encode()  # DuckDB's message about half a character does not help
    try:
        with duckdb.connect(":memory:") as connection:
            _refuse_changes(connection, query)
            _create_views(connection, folder, rows, [v for v in VIEWS if v in query.lower()])
            for option, value in (_bounds(limits) | _LOCKED).items():
                connection.execute(f"SET {option} = {value!r}")
            return _in_time(connection, query, limits)
    except duckdb.OutOfMemoryException as error:
        raise _too_much(f"{limits.memory_nbytes >> 20} MiB", "memory", "--memory") from error
    # Values that Python has no type for come as the last ones.
    except (duckdb.Error, pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise _bad_query(str(error)) from error


def _answer(
    connection: duckdb.DuckDBPyConnection, query: str, most: int
) -> tuple[list[str], list[tuple[Any, ...]]]:
    result = connection.execute(query)
    # DuckDB answers a text without any statement with None.
    if result is None:
        return [], []
    rows: list[tuple[Any, ...]] = []
    while batch := result.fetchmany(_BATCH_ROWS):
        rows += (tuple(map(_plain, row)) for row in batch)
        if len(rows) > most:
            raise _bad_query(f"more than {most} rows: add LIMIT, or aggregate")
    return [d[0] for d in result.description or []], rows


def _in_time(
    connection: duckdb.DuckDBPyConnection, query: str, limits: Limits
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The answer, computed in another thread: this one handles signals and the time limit.

    A long step of DuckDB checks neither.
    """
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(_answer, connection, query, limits.rows)
        try:
            is_late = not wait([answer], limits.timeout_s).done
        finally:
            while not answer.done():  # an interruption does not stop what begins after it
                connection.interrupt()
                wait([answer], _AGAIN_S)
    try:
        return answer.result()
    except Exception as error:
        if is_late:
            raise _too_much(f"{limits.timeout_s:g} s", "time", "--timeout") from error
        raise


def _bounds(limits: Limits) -> dict[str, Any]:
    return {
        "memory_limit": f"{limits.memory_nbytes}B",
        "threads": min(_THREADS, cores()),
    }


def export(folder: Path, rows: Rows, target: Path) -> None:
    """Write all views as tables of a new DuckDB file at `target`.

    Raises MergePipeError if `target` exists or the views cannot be read.
    """
    import duckdb

    if target.exists():
        raise _no_export(target, "the file exists already", "choose another name, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with duckdb.connect(":memory:") as connection:
            _create_views(connection, folder, rows, VIEWS)
            path = str(temp).replace("'", "''")
            connection.execute(f"ATTACH '{path}' AS out")
            for name in VIEWS:
                connection.execute(f"CREATE TABLE out.{name} AS SELECT * FROM {name}")
            connection.execute("DETACH out")
        adopt_file(temp, target)
    except (duckdb.Error, pa.ArrowException) as error:
        raise _no_export(target, str(error), "delete or restore the file it names") from error
    finally:
        remove_tree(temp)


def _create_views(
    connection: duckdb.DuckDBPyConnection, folder: Path, rows: Rows, named: Collection[str]
) -> None:
    """All views; those that are not `named` are empty."""
    sources = {VIEWS[name].source for name in named}
    for name, files in FILES.items():
        paths = sorted(folder.glob(files.pattern)) if name in sources else []
        connection.register(name, _dataset(paths, files))
    for name, view in VIEWS.items():
        source = view.source
        if source is None:
            source = f"{name}_rows"
            of_view = rows[name]() if name in named and name in rows else ()
            connection.register(source, _table(view, of_view))
        connection.execute(f"CREATE VIEW {name} AS SELECT {view.select} FROM {source}")


def _dataset(paths: Iterable[Path], files: Files) -> ds.Dataset:
    """The files as one dataset, without damaged ones; some columns come from the paths."""
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    parquet, fragments, local = ds.ParquetFileFormat(), [], LocalFileSystem()
    for path in paths:
        match = files.path.search(path.as_posix())
        if match is None or not is_good(path):
            continue
        values = {k: int(v) if k == "block_elems" else v for k, v in match.groupdict().items()}
        facts = reduce(and_, (ds.field(k) == v for k, v in values.items()))
        fragments.append(parquet.make_fragment(str(path), local, facts))
    return ds.FileSystemDataset(fragments, files.columns, parquet, local)


def _table(view: View, rows: Iterable[Sequence[Any]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(view.columns)
    arrays = [pa.array(c, t) for c, t in zip(columns, view.types, strict=True)]
    return pa.table(arrays, names=list(view.columns))


def _refuse_changes(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    try:
        kinds = [statement.type.name for statement in connection.extract_statements(query)]
    except ValueError:  # statements that DuckDB's own Python has no name for
        kinds = ["a statement without a name"]
    for kind in kinds:
        if kind not in _READING:
            raise _bad_query(f"{kind} where only SELECT is answered: the catalog is read-only")


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


def _bad_query(problem: str) -> MergePipeError:
    return MergePipeError(
        "A query failed",
        where="sql",
        found=problem,
        expected="SQL over the views " + ", ".join(VIEWS),
        next_step="run `mergepipe sql` without a query to see them",
    )


def _too_much(most: str, what: str, option: str) -> MergePipeError:
    return MergePipeError(
        f"A query needs too much {what}",
        where="sql",
        expected=f"at most {most}",
        next_step=f"select less, or raise {option}",
    )


def _no_export(target: Path, problem: str, next_step: str) -> MergePipeError:
    return MergePipeError(
        "The catalog cannot be exported",
        where=str(target),
        expected="a new file for a readable catalog",
        found=problem,
        next_step=next_step,
    )
