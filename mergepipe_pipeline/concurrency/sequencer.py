"""Sequencing: threads work on parts of one range at once, but do one step in the parts' order."""

from __future__ import annotations

from concurrent.futures import CancelledError
from threading import Condition


class Sequencer:
    """How far one range of elements is done; only its next part may do the ordered step.

    What threads touch between `wait` and `advance` needs no lock. Whoever starts the threads must
    call `cancel` when one of them fails, because the threads behind it would wait forever.
    """

    def __init__(self, start_elem: int = 0) -> None:
        self._changed = Condition()
        self._done_elem, self._is_cancelled = start_elem, False

    def wait(self, start_elem: int) -> None:
        """Return when every element before `start_elem` is done. Raises CancelledError."""
        with self._changed:
            self._changed.wait_for(lambda: self._done_elem == start_elem or self._is_cancelled)
            if self._is_cancelled:
                raise CancelledError

    def advance(self, stop_elem: int) -> None:
        """Say that every element before `stop_elem` is done."""
        with self._changed:
            self._done_elem = stop_elem
            self._changed.notify_all()

    def cancel(self) -> None:
        """End the waiting of all threads with CancelledError."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()
