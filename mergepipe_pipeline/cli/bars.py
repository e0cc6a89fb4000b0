"""Progress on stderr: bars for people, lines of JSON for machines."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from mergepipe_pipeline.text import in_one_line

if TYPE_CHECKING:
    from rich.progress import Progress

    from mergepipe_pipeline.progress import Advance

#: Seconds between two lines about one task.
_PAUSE_S = 0.5
#: Prints each of the texts that it is given.
Warn = Callable[..., None]


class Bars:
    """Progress bars on stderr (rich)."""

    def __init__(self, warn: Warn, *, visible: bool) -> None:
        self.warn = warn
        self._visible = visible
        self._bars: Progress | None = None

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
    def _line(bars: Progress, label: str, total_nbytes: int) -> Advance:
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
