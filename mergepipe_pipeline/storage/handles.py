"""Open files for reading, fewer than the process may have: idle ones are closed for new ones.

Sixteen sharded experts of 70B are some hundreds of files, and a process often may open 1024. It
caches no bytes.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass

#: Threads that may hold files at the same time, for none of which another one is closed.
_THREADS = 16


@dataclass(slots=True, eq=False)
class OpenFile:
    """A descriptor, how many read from it now, and whether its owner still wants it."""

    descriptor: int
    users: int = 0
    wanted: bool = True


class Handles:
    """Open files by owner and name, of which at most `most` are kept while nobody reads them.

    None takes half of what the process may open. Safe for several threads.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        # By owner, too: a file replaced meanwhile is not read through what another has open. The
        # longest unused first.
        self._files: dict[tuple[object, str], OpenFile] = {}
        self._lock = threading.Lock()

    def take(self, owner: object, name: str, opened: Callable[[str], int]) -> OpenFile:
        """The file whose descriptor `opened(name)` is, open until it is given back.

        Raises what `opened` does.
        """
        with self._lock:
            file = self._used(owner, name)
        if file is not None:
            return file
        descriptor = opened(name)  # which takes long on a network, and others need not wait
        with self._lock:
            file = self._used(owner, name)
            if file is not None:  # another thread was faster
                os.close(descriptor)
                return file
            self._close_idle(self._limit() - 1)
            file = self._files[owner, name] = OpenFile(descriptor, users=1)
            return file

    def give_back(self, file: OpenFile) -> None:
        """Say that one reader of what `take` gave is done."""
        with self._lock:
            file.users -= 1
            if not file.users and not file.wanted:
                os.close(file.descriptor)

    def close(self, owner: object) -> None:
        """Close all files of `owner`; those that are being read close when that ends."""
        with self._lock:
            for key in [key for key in self._files if key[0] is owner]:
                file = self._files.pop(key)
                file.wanted = False
                if not file.users:
                    os.close(file.descriptor)

    @property
    def share(self) -> int:
        """How many files one of several threads may take before it gives any back."""
        return max(1, self._limit() // _THREADS)

    def _used(self, owner: object, name: str) -> OpenFile | None:
        """An open file with one more user, now the one that was used last."""
        file = self._files.pop((owner, name), None)
        if file is not None:
            file.users += 1
            self._files[owner, name] = file
        return file

    def _limit(self) -> int:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self._most or (soft // 2 if soft > 0 else len(self._files) + 1)

    def _close_idle(self, most: int) -> None:
        """Close the longest unused files until `most` are left, or those that are being read."""
        idle = [key for key, file in self._files.items() if not file.users]
        for key in idle[: max(0, len(self._files) - most)]:
            os.close(self._files.pop(key).descriptor)


#: Of the whole process, as the limit is.
HANDLES = Handles()
