"""A digest of bytes that several threads bring, each in its turn.

Whoever describes a window hashes it, too, while it is in the cache; windows of different tensors
are hashed at once, those of one tensor in the order of their elements.
"""

from __future__ import annotations

from mergepipe_pipeline.digest import new_content_hash
from mergepipe_pipeline.turns import Turn


class OrderedHash:
    """The content digest of one tensor's stored bytes. Safe for several threads."""

    def __init__(self) -> None:
        self._hash, self._turn = new_content_hash(), Turn()

    def update(self, start_elem: int, n_elems: int, raw: memoryview) -> None:
        """Take in the stored bytes of elements [start, start + n), after all before them.

        Raises CancelledError if those will not come.
        """
        self._turn.wait(start_elem)
        self._hash.update(raw)
        self._turn.pass_on(start_elem + n_elems)

    def abandon(self) -> None:
        """Say that something failed, so that nobody waits for it."""
        self._turn.abandon()

    def hexdigest(self) -> str:
        """Of what was taken in: 64 hex digits."""
        return self._hash.hexdigest()
