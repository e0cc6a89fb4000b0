"""Whether to ask again for what an attempt did not give: with back-off, and not for ever."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mergepipe_pipeline.errors import (
    BudgetError,
    CheckpointError,
    CorruptionError,
    GateError,
    IncompatibleCheckpointsError,
    InputChangedError,
    MergePipeError,
    OperatorError,
    RecipeError,
)

#: Attempts at one wanted state.
MOST_ATTEMPTS = 3
#: How many times longer each pause is than the one before it.
_GROWTH = 4
_MOST_SHOWN = 300
#: What stands in an error's text before what to do.
NEXT = " Next: "
#: Errors that the same recipe and inputs give again. Changed or growing files, a full disk, a
#: damaged layer (it is made anew) and everything else pass.
_LASTING: tuple[type[MergePipeError], ...] = (
    RecipeError,
    CheckpointError,
    CorruptionError,
    IncompatibleCheckpointsError,
    BudgetError,
    OperatorError,
    GateError,
)
_LASTING_NAMES = frozenset(c.__name__ for c in _LASTING)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run that ended without success at `ended_s` (seconds since 1970).

    `is_lasting`: the same recipe and inputs would fail again. `inputs_changed`: it found other
    inputs than those that were indexed, which says nothing about either.
    """

    ended_s: float
    error: str
    is_lasting: bool
    inputs_changed: bool = False


def is_lasting(error_names: Collection[str]) -> bool:
    """Whether an error of one of these classes comes again while recipe and inputs are the same."""
    return not _LASTING_NAMES.isdisjoint(error_names)


def is_of_inputs(error_names: Collection[str]) -> bool:
    """Whether an error of one of these classes says that an input changed under the run."""
    return InputChangedError.__name__ in error_names


def reason_to_wait(attempts: Sequence[Attempt], now_s: float, pause_s: float) -> str | None:
    """Why not to try again now, after these attempts at one wanted state; None to try.

    `pause_s` is the pause after the first, in seconds; each further one is four times as long.
    """
    if not attempts:
        return None
    last, n = attempts[-1], len(attempts)
    counted = sum(not a.inputs_changed for a in attempts)
    error = _shortened(last.error)
    if last.is_lasting or counted >= MOST_ATTEMPTS:
        why = "and would again" if last.is_lasting else f"after {n} attempts"
        return (
            f"failing {why}, until the recipe or an input changes or somebody runs it; "
            f"the last error: {error}"
        )
    left_s = pause_s * _GROWTH ** (n - 1) - (now_s - last.ended_s)
    return None if left_s <= 0 else f"the next attempt comes in {left_s:.0f} s; the last: {error}"


def _shortened(error: str) -> str:
    """The beginning of a long error, and what it says to do next."""
    if len(error) <= _MOST_SHOWN:
        return error
    cause, following, step = error.rpartition(NEXT)
    if not following:
        return f"{error[:_MOST_SHOWN]}…"
    told = cause if len(cause) <= _MOST_SHOWN else f"{cause[:_MOST_SHOWN]}…"
    return f"{told}{NEXT}{step}"
