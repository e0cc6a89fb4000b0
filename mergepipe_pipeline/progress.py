"""How long work shows itself: verbs report bytes done, the caller decides how to draw them."""

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


class Silent:
    """Draws nothing."""

    @contextmanager
    def task(self, label: str, total_nbytes: int) -> Iterator[Advance]:
        """Accept and forget."""
        yield lambda nbytes: None
