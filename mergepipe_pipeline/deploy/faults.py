"""Whose fault a failure is: the work's own, the surroundings', or nobody knows.

The one place that decides what is tried again for ever, a few times or not at all. Dagster keeps of
an error its class names and texts, so these decide.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from enum import Enum

from mergepipe_pipeline.errors import (
    BudgetError,
    BusyError,
    CheckpointError,
    CorruptionError,
    DamagedPackError,
    GateError,
    IncompatibleCheckpointsError,
    InputChangedError,
    MergePipeError,
    MetricsError,
    OperatorError,
    RecipeError,
    RemoteError,
    ResourceError,
    StorageFullError,
    causes,
)

#: What is told of a process that is gone.
SILENT = "its process ended without a word: it was killed, or had no memory"


class Fault(Enum):
    """Whose fault a failure is, which says how often the same is tried again."""

    #: The same recipe and inputs would fail again: not once more.
    LASTING = "lasting"
    #: Nobody knows: a few times.
    UNKNOWN = "unknown"
    #: Storage, network, memory or the process: as often as it takes.
    SURROUNDINGS = "surroundings"


#: Errors that the same recipe and inputs give again; not their subclasses, as of changed or growing
#: files, or of a damaged layer, which is made anew.
_LASTING: tuple[type[MergePipeError], ...] = (
    RecipeError,
    CheckpointError,
    CorruptionError,
    IncompatibleCheckpointsError,
    BudgetError,
    OperatorError,
    GateError,
    MetricsError,
)
_LASTING_NAMES = frozenset(c.__name__ for c in _LASTING)
#: Errors that say nothing about recipe and inputs. An input that changed under a run is none of
#: what was asked for, and a damaged pack was set aside.
_AROUND: tuple[type[BaseException], ...] = (
    StorageFullError,
    RemoteError,
    ResourceError,
    BusyError,
    InputChangedError,
    DamagedPackError,
    MemoryError,
    TimeoutError,
    ConnectionError,
    ConnectionAbortedError,
    ConnectionRefusedError,
    ConnectionResetError,
    BrokenPipeError,
)
#: Of Dagster and its executors, for a process that was killed; of name servers; and what libraries
#: make of too little memory.
_AROUND_NAMES = frozenset(c.__name__ for c in _AROUND) | {
    "_ArrayMemoryError",
    "ArrowMemoryError",
    "OutOfMemoryError",
    "ChildProcessCrashException",
    "DagsterExecutionInterruptedError",
    "DagsterUserCodeUnreachableError",
    "gaierror",
}
#: What the system says where storage or the way to it fails, whatever class is made of that.
_OUTAGES = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "ESTALE", "ENOTCONN", "ENODEV"),
        *("ENXIO", "EREMOTEIO", "ETIMEDOUT", "ENETDOWN", "ENETUNREACH", "EHOSTDOWN"),
        *("EHOSTUNREACH", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "ESHUTDOWN"),
        *("EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "ENOLCK"),
    )
)
#: A name that is not there is an outage, too, unless an error of the work says what it means.
_GONE = errno.ENOENT
_ERRNO = re.compile(r"\[Errno (-?\d+)\]")


def fault_of(errors: Iterable[tuple[str, str]]) -> Fault:
    """Whose fault an error is, given the class name and the text of it and of each cause of it."""
    causes = list(errors)
    names = {name for name, _ in causes}
    numbers = {int(m[1]) for _, text in causes if (m := _ERRNO.match(text))}
    if names & _AROUND_NAMES or numbers & _OUTAGES:
        return Fault.SURROUNDINGS
    if names & _LASTING_NAMES:
        return Fault.LASTING
    return Fault.SURROUNDINGS if _GONE in numbers else Fault.UNKNOWN


def fault_of_exception(error: BaseException) -> Fault:
    """The same of an exception, with the causes that it names."""
    return fault_of(_named(error))


def _named(error: BaseException) -> Iterator[tuple[str, str]]:
    for cause in causes(error):
        for cls in type(cause).__mro__:
            if cls is type(cause) or cls.__module__ == "builtins":
                yield cls.__name__, str(cause)
