"""The standard streams of the process: no work ends because nobody can be told how it goes."""

from __future__ import annotations

import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

_STANDARD = (0, 1, 2)


class _Lossy(FileIO):
    """A file of which what cannot be written is lost: on a full disk, or where nobody reads."""

    def write(self, data: Any, /) -> int:
        """Write what can be written; gives the number of all bytes if that fails."""
        nbytes = memoryview(data).nbytes
        try:
            written: int | None = super().write(data)
        except OSError:
            return nbytes
        return nbytes if written is None else written


def prepare_streams() -> None:
    """Let text that the terminal does not know be escaped, and messages on stderr never fail."""
    for number in _STANDARD:  # else a file of the warehouse gets the number of a closed stream
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if isinstance(sys.stdout, TextIOWrapper):  # None, where the caller closed it
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is sys.__stderr__:
        encoding = sys.stderr.encoding if isinstance(sys.stderr, TextIOWrapper) else "utf-8"
        raw = BufferedWriter(_Lossy(2, "w", closefd=False))
        sys.stderr = TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True)
