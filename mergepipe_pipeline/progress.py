"""How long work shows itself: verbs report bytes done and warnings, the caller draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    """Draws one bar per task."""

    def task(self, label: str, total_nbytes: int) -> AbstractContextManager[Advance]:
        """A bar named `label` for `total_nbytes`; the context gives a function to advance it."""
        ...

    def warn(self, *warnings: str) -> None:
        """Show warnings."""
        ...


class Silent:
    """Draws nothing."""

    @contextmanager
    def task(self, label: str, total_nbytes: int) -> Iterator[Advance]:
        """Accept and forget."""
        yield lambda nbytes: None

    def warn(self, *warnings: str) -> None:
        """Leave warnings to who reads the plan, which has them, too."""
