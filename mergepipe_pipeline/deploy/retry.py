"""Whose fault a failure is, and when to ask again for what an attempt did not give.

The one place that decides what is tried again for ever, a few times or not at all, with which
pauses: for merges, searches, index runs and packing alike. Dagster keeps of an error the names of
its classes and their texts, so these decide.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
#: Attempts at one wanted state that fail for no reason in the surroundings.
MOST_ATTEMPTS = 3
#: The longest pause between two attempts, in seconds, unless the first one is longer.
LONGEST_PAUSE_S = 3600.0
#: How many times longer each pause is than the one before it.
_GROWTH = 4.0
#: Pauses do not grow any more after so many attempts, whatever the first one was.
_MOST_GROWN = 32
_MOST_SHOWN = 300
#: What stands in an error's text before what to do.
NEXT = " Next: "


class Fault(Enum):
    """Whose fault a failure is, which says how often the same is tried again."""

    #: The same recipe and inputs would fail again: not once more.
    LASTING = "lasting"
    #: Nobody knows: a few times.
    UNKNOWN = "unknown"
    #: Storage, network, memory or the process: as often as it takes.
    SURROUNDINGS = "surroundings"


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


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run that ended without success at `ended_s` (seconds since 1970).

    `number` counts the attempts at one wanted state that failed, from 1.
    """

    ended_s: float
    error: str
    fault: Fault
    number: int = 1


def pause_s(first_s: float, failed: int) -> float:
    """Seconds to wait after so many attempts, at least one; `first_s` is the first pause.

    Each is four times as long as the one before it, and an hour at most.
    """
    grown_s = first_s * _GROWTH ** min(failed - 1, _MOST_GROWN)
    return min(grown_s, max(first_s, LONGEST_PAUSE_S))


def left_s(pause: float, passed_s: float) -> float:
    """Seconds that are left of a pause; `passed_s` is negative where the clock was set back.

    By more than the pause, it says nothing of when the pause began, which is taken to be over.
    """
    return pause - passed_s if abs(passed_s) < pause else 0.0


def is_last(attempts: Sequence[Attempt]) -> bool:
    """Whether no attempt follows these by itself."""
    counted = sum(a.fault is not Fault.SURROUNDINGS for a in attempts)
    return attempts[-1].fault is Fault.LASTING or counted >= MOST_ATTEMPTS


def reason_to_wait(attempts: Sequence[Attempt], now_s: float, first_s: float) -> str | None:
    """Why not to try again now, after the last attempts at one wanted state; None to try.

    `attempts` are `MOST_ATTEMPTS` of them, if there were so many, and `first_s` is the pause after
    the first, in seconds.
    """
    if not attempts:
        return None
    last = attempts[-1]
    error = _shortened(last.error)
    if is_last(attempts):
        why = "and would again" if last.fault is Fault.LASTING else f"after {last.number} attempts"
        return (
            f"failing {why}, until the recipe or an input changes or somebody runs it; "
            f"the last error: {error}"
        )
    wait_s = left_s(pause_s(first_s, last.number), now_s - last.ended_s)
    if wait_s <= 0:
        return None
    until = ", and so on until one works" if last.fault is Fault.SURROUNDINGS else ""
    return (
        f"the next attempt comes in {wait_s:.0f} s, after {last.number} that failed{until}; "
        f"the last: {error}"
    )


def _shortened(error: str) -> str:
    """The beginning of a long error, and what it says to do next."""
    if len(error) <= _MOST_SHOWN:
        return error
    cause, following, step = error.rpartition(NEXT)
    if not following:
        return f"{error[:_MOST_SHOWN]}…"
    shown = cause if len(cause) <= _MOST_SHOWN else f"{cause[:_MOST_SHOWN]}…"
    return f"{shown}{NEXT}{step}"
