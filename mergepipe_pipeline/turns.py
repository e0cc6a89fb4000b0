"""Threads that work on parts of one range at once, but do one step of it in the parts' order."""

from __future__ import annotations

from concurrent.futures import CancelledError
from threading import Condition


class Turn:
    """How far a range of elements has come. What is touched between `wait` and `pass_on` is safe.

    Whoever starts the threads must `abandon` when one of them fails: the others would wait for it.
    """

    def __init__(self, start_elem: int = 0) -> None:
        self._changed = Condition()
        self._reached, self._is_abandoned = start_elem, False

    def wait(self, start_elem: int) -> None:
        """Return when all before element `start_elem` is done. Raises CancelledError if left."""
        with self._changed:
            self._changed.wait_for(lambda: self._reached == start_elem or self._is_abandoned)
            if self._is_abandoned:
                raise CancelledError

    def pass_on(self, stop_elem: int) -> None:
        """Say that all before element `stop_elem` is done."""
        with self._changed:
            self._reached = stop_elem
            self._changed.notify_all()

    def abandon(self) -> None:
        """Say that the run is being left, so that nobody waits for what will not come."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()
