"""What all commands share: `--home`, `--json`, tables, and how errors leave."""

from __future__ import annotations

import csv
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from mergepipe_pipeline.cli.bars import Bars, JsonLines
from mergepipe_pipeline.cli.ending import as_error, narrow_space, traced
from mergepipe_pipeline.errors import MergePipeError, NotFoundError
from mergepipe_pipeline.storage.atomic import READ_ONLY, write_atomic
from mergepipe_pipeline.text import in_one_line, json_text, visible

if TYPE_CHECKING:
    from mergepipe_pipeline.progress import Progress
    from mergepipe_pipeline.warehouse import Warehouse

T = TypeVar("T")
#: No option means more bytes, seconds, elements or versions; seeds may have 32 bits.
_MOST = (1 << 32) - 1


@dataclass(frozen=True)
class Console:
    """Where a command writes: data on stdout (JSON or text), progress and warnings on stderr.

    `began_s` is when the command began (`time.monotonic`).
    """

    home_dir: str | None
    as_json: bool
    began_s: float = field(default_factory=time.monotonic)

    @functools.cached_property
    def place(self) -> Warehouse:
        """The warehouse, which may not be there. Raises MergePipeError if it cannot be."""
        from mergepipe_pipeline.warehouse import Warehouse

        return Warehouse.at(self.home_dir)

    @functools.cached_property
    def warehouse(self) -> Warehouse:
        """The warehouse, created if it is not there."""
        return self.place.ensure()

    @functools.cached_property
    def existing(self) -> Warehouse:
        """The warehouse. Raises NotFoundError, and creates nothing, if it is not there.

        One that cannot be written may lack folders.
        """
        if not self.place.is_there:
            raise NotFoundError(
                "There is no warehouse here",
                where=f"--home or MERGEPIPE_HOME, {self.place.root}",
                next_step="give its folder; `register`, `merge` and others make a new one",
            )
        try:
            return self.warehouse
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
        return self.place

    @property
    def progress(self) -> Progress:
        """On stderr: bars for people at a terminal, lines of JSON for machines."""
        if self.as_json:
            return JsonLines(self.warn, sys.stderr)
        return Bars(self.warn, visible=sys.stderr.isatty())

    def tell_of_compilation(self) -> None:
        """Say to people why the first merge after an installation takes longer."""
        from mergepipe_pipeline.jit import kernel_cache

        if not self.as_json and not kernel_cache().exists():
            click.echo("compiling kernels, once after an installation: some 20 s", err=True)

    def show(self, data: Any, *lines: str) -> None:
        """Print `data` as JSON, or the lines for people."""
        if self.as_json:
            click.echo(json_text(data))
        else:
            for line in lines:
                click.echo(visible(line))

    def warn(self, *warnings: str) -> None:
        """Print warnings to stderr."""
        for warning in warnings:
            click.echo(f"warning: {visible(warning)}", err=True)

    @contextmanager
    def logged_warnings(self) -> Iterator[None]:
        """Show what the core logs meanwhile as warnings."""
        log, handler = logging.getLogger("mergepipe"), _Warner(self)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)


class _Warner(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.warn(record.getMessage())


def download_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that may read at addresses `--cache-limit`."""

    def limit(_: click.Context, __: click.Parameter, text: str | None) -> None:
        if text is not None:
            from mergepipe_pipeline.remote.ranges import LIMIT, parse_size

            try:
                parse_size(text, "--cache-limit")
            except MergePipeError as error:
                raise click.BadParameter(str(error)) from error
            os.environ[LIMIT] = text

    return click.option(
        "--cache-limit",
        metavar="SIZE",
        expose_value=False,
        callback=limit,
        help="Bytes of downloads to keep on disk (default: $MERGEPIPE_CACHE_LIMIT or 20GB).",
    )(command)


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command or a group `--home` and `--json`; those of the innermost that has them hold.

    The function gets neither: what was asked for is in the context's `obj`.
    """

    @click.option(
        "--home",
        "home_dir",
        metavar="DIR",
        default=None,
        help="Warehouse folder (default: $MERGEPIPE_HOME or ./warehouse).",
    )
    @click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="For machines: one JSON result on stdout, progress as lines of JSON on stderr.",
    )
    @click.pass_context
    @functools.wraps(command)
    def run(ctx: click.Context, /, home_dir: str | None, as_json: bool, **others: Any) -> None:
        outer_home, outer_json = ctx.obj or (os.environ.get("MERGEPIPE_HOME"), False)
        ctx.obj = (outer_home if home_dir is None else home_dir, as_json or outer_json)
        command(**others)

    return run


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command `--home` and `--json`, a `Console` as first argument, and the exit codes."""

    @options
    @functools.wraps(function)
    def run(**given: Any) -> None:
        console = Console(*click.get_current_context().obj)
        _refuse_absurd_numbers(given)
        try:
            console.warn(*narrow_space())
            with console.logged_warnings():
                function(console, **given)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            # Who reads has seen enough; what is still buffered has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except Exception as error:
            click.echo(visible(traced(error)), nl=False, err=True)
            fail(as_error(error), console.as_json)

    return run


def _refuse_absurd_numbers(given: Mapping[str, Any]) -> None:
    """Raise BadParameter for numbers of arguments that nothing here counts to, NaN among them."""
    for name, value in given.items():
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if isinstance(number, int | float) and not abs(number) <= _MOST:
                option = f"--{name.replace('_', '-')}"
                raise click.BadParameter(f"expected a number up to {_MOST}", param_hint=option)


def fail(error: MergePipeError, as_json: bool) -> NoReturn:
    """Print the error (JSON on stdout for machines, text on stderr for people) and exit."""
    if as_json:
        body = {k: v for k, v in vars(error).items() if v}
        shown = {"error": {"class": type(error).__name__, **body}, "exit_code": error.exit_code}
        with suppress(OSError):  # a full disk may be where stdout goes
            click.echo(json_text(shown))
    click.echo(f"error: {visible(error.for_terminal())}", err=True)
    sys.exit(error.exit_code)


@dataclass(frozen=True)
class Answer:
    """What a command has to say: JSON, lines for people, records of a CSV file, and a picture."""

    data: Any
    lines: Sequence[str]
    records: Sequence[Mapping[str, Any]] = ()
    picture: Callable[[], bytes] | None = None


def answer(
    *, csv: str, picture: str = ""
) -> Callable[[Callable[..., Answer]], Callable[..., None]]:
    """Give a command that returns an `Answer` what `verb` gives, `--csv`, and maybe `--picture`.

    Both texts are the help of these options.
    """

    def decorated(function: Callable[..., Answer]) -> Callable[..., None]:
        @verb
        @functools.wraps(function)
        def run(console: Console, csv_file: str | None, **given: Any) -> None:
            png_file = given.pop("png_file", None)
            found = function(console, **given)
            if csv_file:
                write_csv(csv_file, found.records)
            if png_file and found.picture:
                write_file(png_file, found.picture())
            console.show(found.data, *found.lines)

        if picture:
            run = click.option("--picture", "png_file", type=click.Path(), help=picture)(run)
        return click.option("--csv", "csv_file", type=click.Path(), help=csv)(run)

    return decorated


def counted(n: int, noun: str) -> str:
    """1 file, 2 files."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a plain left-aligned table, numbers right-aligned."""
    cells = [[in_one_line(str(c)) for c in row] for row in rows]
    widths = [max([len(h), *(len(r[i]) for r in cells)]) for i, h in enumerate(headers)]
    numeric = [
        all(not isinstance(r[i], str) for r in rows) and bool(rows) for i in range(len(headers))
    ]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)
        ).rstrip()

    return [line(headers), line(["-" * w for w in widths]), *(line(r) for r in cells)]


def column_table(rows: Sequence[T], columns: Mapping[str, Callable[[T], Any]]) -> list[str]:
    """Lines of a table of columns by their headers."""
    return table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def cells(rows: Sequence[T], columns: Mapping[str, Callable[[T], Any]]) -> list[str]:
    """As `column_table`, after an empty line; nothing without rows."""
    return ["", *column_table(rows, columns)] if rows else []


def recipe_folder(path: str) -> Path:
    """The folder that relative model paths of a recipe may start from."""
    return Path(path).resolve().parent


def write_csv(path: str | Path, records: Sequence[Mapping[str, Any]]) -> None:
    """One line per flat record under the keys of the first; makes the folder."""
    out = StringIO()
    if records:
        writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    write_file(path, out.getvalue().encode(errors="backslashreplace"))


def write_file(path: str | Path, content: bytes) -> None:
    """A file that a user asked for by name, whole or as it was; makes the folder."""
    target = Path(path)
    if target.exists() and not target.is_file():  # a terminal or a pipe; a folder is refused
        target.write_bytes(content)
    else:
        write_atomic(target.resolve(), content)
