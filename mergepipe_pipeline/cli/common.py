"""The parts that all commands share: `--home`, `--json`, tables, progress, and how errors leave."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import click

from mergepipe_pipeline.cli.ending import as_error, narrow_space, traced
from mergepipe_pipeline.errors import MergePipeError, NotFoundError
from mergepipe_pipeline.storage.atomic import READ_ONLY, write_atomic
from mergepipe_pipeline.text import in_one_line, json_text, visible

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from mergepipe_pipeline.progress import Advance, Progress
    from mergepipe_pipeline.warehouse import Warehouse


T = TypeVar("T")
#: No option means more bytes, seconds, elements or versions; seeds may have 32 bits.
_MOST = (1 << 32) - 1
#: Seconds between two lines about one task.
_PAUSE_S = 0.5
#: Prints each of the texts that it is given.
Warn = Callable[..., None]


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
        from mergepipe_pipeline.jit import carried_folder, kernel_cache

        if not (self.as_json or carried_folder().exists() or kernel_cache().exists()):
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


def picture_option(drawn: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `--picture FILE`, which it gets as `png_file`."""
    help_text = f"Write {drawn} (PNG) here."
    return click.option("--picture", "png_file", type=click.Path(), help=help_text)


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
    """A `column_table` after an empty line; nothing without rows."""
    return ["", *column_table(rows, columns)] if rows else []


def section(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A `table` after an empty line; nothing without rows."""
    return ["", *table(headers, rows)] if rows else []


def recipe_folder(path: str) -> Path:
    """The folder that relative model paths of a recipe may start from."""
    return Path(path).resolve().parent


def write_file(path: str | Path, content: bytes) -> None:
    """A file that a user asked for by name, whole or as it was; makes the folder."""
    target = Path(path)
    if target.exists() and not target.is_file():  # a terminal or a pipe; a folder is refused
        target.write_bytes(content)
    else:
        write_atomic(target.resolve(), content)


class Bars:
    """Progress bars on stderr (rich)."""

    def __init__(self, warn: Warn, *, visible: bool) -> None:
        self.warn = warn
        self._visible = visible
        self._bars: RichProgress | None = None

    @contextmanager
    def task(self, label: str, total_nbytes: int) -> Iterator[Advance]:
        """One bar in bytes, with rate and time left."""
        if not self._visible or total_nbytes == 0:
            yield lambda nbytes: None
            return
        if self._bars is not None:  # a terminal shows one display, with a line for each task
            yield self._line(self._bars, label, total_nbytes)
            return
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=RichConsole(stderr=True)) as bars:
            self._bars = bars
            try:
                yield self._line(bars, label, total_nbytes)
            finally:
                self._bars = None

    @staticmethod
    def _line(bars: RichProgress, label: str, total_nbytes: int) -> Advance:
        bar = bars.add_task(in_one_line(label), total=total_nbytes)
        return lambda nbytes: bars.advance(bar, nbytes)


class JsonLines:
    """One line of JSON for each step of progress: task, done, total and their unit.

    A task tells of its begin, of its end, also if it fails, and twice a second meanwhile.
    """

    def __init__(
        self, warn: Warn, out: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.warn = warn
        self._out = out
        self._clock = clock

    @contextmanager
    def task(self, label: str, total_nbytes: int) -> Iterator[Advance]:
        """Lines about one task of `total_nbytes`; any thread may advance it."""
        lock, done, told_s = threading.Lock(), 0, self._clock()

        def advance(nbytes: int) -> None:
            nonlocal done, told_s
            with lock:
                done += nbytes
                if self._clock() - told_s >= _PAUSE_S and done < total_nbytes:
                    told_s = self._clock()
                    self._tell(label, done, total_nbytes)

        self._tell(label, done, total_nbytes)
        try:
            yield advance
        finally:
            self._tell(label, done, total_nbytes)

    def _tell(self, label: str, done: int, total: int) -> None:
        line = {"task": label, "done": done, "total": total, "unit": "bytes"}
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()
