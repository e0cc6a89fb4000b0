"""Things that are costly to make and are used again, such as buffers whose pages are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class FreeList(Generic[T]):
    """Gives out a free thing or makes one; safe for several threads.

    It makes as many as are in use at once. `max_free` of those given back are kept (None: all).
    """

    def __init__(self, make: Callable[[], T], max_free: int | None = None) -> None:
        self._make = make
        self._free: deque[T] = deque(maxlen=max_free)  # its ends are safe without a lock

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self) -> T:
        """A thing that nobody else has until it is given back."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give_back(self, thing: T) -> None:
        """Make a thing free for the next caller."""
        self._free.append(thing)

    @contextmanager
    def lent(self) -> Iterator[T]:
        """One thing for the time of a `with` block."""
        thing = self.take()
        try:
            yield thing
        finally:
            self.give_back(thing)
