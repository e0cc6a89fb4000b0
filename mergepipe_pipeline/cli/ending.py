"""How a command ends: any exception as an error in the project's words, a signal in order.

No work ends because nobody can be told how it goes: messages on standard error never fail.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import traceback
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any

from mergepipe_pipeline.errors import (
    DefectError,
    MergePipeError,
    ResourceError,
    StorageFullError,
    causes,
)
from mergepipe_pipeline.storage.atomic import FULL
from mergepipe_pipeline.storage.permissions import foreign_error

#: Set to 1, it shows where an error comes from.
TRACEBACK = "MERGEPIPE_TRACEBACK"

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHORT = (errno.ENOMEM, errno.EAGAIN)
#: What libraries say, in small letters, where memory or threads are short.
_SHORT_TEXTS = (
    "can't start new thread",
    "allocate memory",
    "out of memory",
    "failed to map segment",
    "resource temporarily unavailable",
)
_NEXT = {
    errno.ENOENT: "check the path; if another program removed it meanwhile (`mergepipe gc`?), run "
    "the same command again: finished work is kept",
    errno.EROFS: "what is written must be on a file system that may be written: look at --home, "
    "--out and --cold",
    errno.EMFILE: "raise `ulimit -n`, then run again",
    errno.EFBIG: "raise `ulimit -f`, then run again",
}
#: Address space below which compiled libraries were seen to abort: Rust's, of pydantic and BLAKE3.
_NARROW_NBYTES = 640 << 20
_received: list[int] = []


class Stopped(BaseException):
    """A signal asks the process to end; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        name = signal.Signals(self.number).name
        return f"stopped by {name}; what was finished is kept: run the same command again"


def stop_by_signals() -> None:
    """Let the first SIGINT, SIGTERM or SIGHUP raise Stopped, and any second one end at once.

    One that is ignored, as under `nohup`, stays so.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in _SIGNALS:
        if signal.getsignal(other) is _stop:
            signal.signal(other, signal.SIG_DFL)
    _received.append(number)
    raise Stopped(number)


def narrow_space() -> list[str]:
    """Warnings before the work: a limit under which a process may end without an error."""
    limit_nbytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if not 0 <= limit_nbytes < _NARROW_NBYTES:
        return []
    return [
        f"`ulimit -v` allows {limit_nbytes >> 20} MiB of address space: below "
        f"{_NARROW_NBYTES >> 20} MiB a compiled library may abort the process (exit 134) instead "
        "of an error; nothing finished is lost"
    ]


def as_error(error: Exception) -> MergePipeError:
    """The exception as an error for users. Raises Stopped if it is what became of a signal."""
    if _received:  # a library may turn it into an exception of its own
        raise Stopped(_received[0]) from error
    if isinstance(error, MergePipeError):
        return error
    message = str(error)
    if any(map(_is_short, causes(error, besides=True))):
        return ResourceError(
            "The system gives no more memory or threads",
            found=_shortage(error),
            next_step="raise the limit (`ulimit -v`, `ulimit -u`, the container's) or close other "
            "programs, then run again: finished work is kept",
        )
    if isinstance(error, OSError):
        return from_os_error(error)
    if isinstance(error, UnicodeError):
        text = (
            error.object if isinstance(error, UnicodeEncodeError | UnicodeDecodeError) else message
        )
        return MergePipeError(
            "A text is not Unicode",
            where=repr(text[:60]),
            expected="text, or a file name, in UTF-8",
            found=message,
            next_step="rename the file, or write the text in UTF-8",
        )
    if isinstance(error, RecursionError):
        return MergePipeError(
            "A file is nested too deeply", found=message, next_step="look at JSON and YAML files"
        )
    return DefectError(
        "An unexpected error ended the command",
        where=_place(error),
        found=f"{type(error).__name__}: {message}" if message else type(error).__name__,
        next_step=f"this is a defect of mergepipe: run again with {TRACEBACK}=1, and report what "
        "is printed",
    )


def traced(error: BaseException) -> str:
    """The error's traceback if the user wants to see it, else an empty text."""
    if os.environ.get(TRACEBACK) != "1":
        return ""
    return "".join(traceback.format_exception(error))


def from_os_error(error: OSError) -> MergePipeError:
    """An operating system's refusal in the project's words."""
    if error.errno in FULL:
        return StorageFullError(
            "The disk is full",
            where=str(error.filename or "the warehouse, or where the output goes"),
            found=str(error.strerror),
            next_step="free space and run the same command again; nothing is lost",
        )
    return foreign_error(error) or MergePipeError(
        "The operating system refused",
        where=str(error.filename or "unknown file"),
        found=str(error.strerror or error),
        next_step=_NEXT.get(error.errno or 0, "check the path and its permissions, then run again"),
    )


def _shortage(error: BaseException) -> str:
    """The line that tells it: libraries put advice about other causes around it."""
    lines = str(error).splitlines()
    return next(filter(_tells_shortage, lines), lines[0] if lines else type(error).__name__)


def _is_short(error: BaseException) -> bool:
    # SystemError is what the interpreter makes of a library that fails without a word.
    if isinstance(error, MemoryError | SystemError) or (
        isinstance(error, OSError) and error.errno in _SHORT
    ):
        return True
    return _tells_shortage(str(error))


def _tells_shortage(message: str) -> bool:
    return any(text in message.lower() for text in _SHORT_TEXTS)


def _place(error: Exception) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else None


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
