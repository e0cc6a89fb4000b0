"""When to ask again for what an attempt did not give: with back-off, and for how long.

Faults of the surroundings are tried until they pass, others `MOST_ATTEMPTS` times at most. The same
pauses hold for merges, searches, index runs and packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mergepipe_pipeline.deploy.faults import Fault

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
