"""A digest of bytes that several threads bring, each in its turn.

Whoever describes a window hashes it, too, while it is in the cache; windows of different tensors
are hashed at once, those of one tensor in the order of their elements.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from threading import Condition

from mergepipe_pipeline.digest import new_content_hash


class OrderedHash:
    """The content digest of one tensor's stored bytes. Safe for several threads."""

    def __init__(self) -> None:
        self._hash, self._turn = new_content_hash(), Condition()
        self._reached, self._is_abandoned = 0, False

    def update(self, start_elem: int, n_elems: int, raw: memoryview) -> None:
        """Take in the stored bytes of elements [start, start + n), after all before them.

        Raises CancelledError if those will not come.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._reached == start_elem or self._is_abandoned)
            if self._is_abandoned:
                raise CancelledError
        self._hash.update(raw)
        with self._turn:
            self._reached = start_elem + n_elems
            self._turn.notify_all()

    def abandon(self) -> None:
        """Say that something failed, so that nobody waits for it."""
        with self._turn:
            self._is_abandoned = True
            self._turn.notify_all()

    def hexdigest(self) -> str:
        """Of what was taken in: 64 hex digits."""
        return self._hash.hexdigest()
