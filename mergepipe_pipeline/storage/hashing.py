"""The digest of a file at the disk's speed, without crowding others out of the page cache."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from mergepipe_pipeline.digest import new_hash
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.uncached import read_uncached

_CHUNK_NBYTES = 4 << 20

_local = threading.local()


def file_sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a regular file's bytes. Raises CorruptionError for what is none, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptionError(
                "What should be a file is none",
                where=str(path),
                expected="a regular file",
                found="a folder, pipe or device",
                next_step="remove it",
            )
        running, room, at = new_hash(), _room(), 0
        while n := read_uncached(descriptor, at, room) or os.preadv(descriptor, [room], at):
            running.update(room[:n])
            at += n
            if progress:
                progress(n)
        return running.hexdigest()
    finally:
        os.close(descriptor)


def _room() -> memoryview:
    """This thread's buffer."""
    if not hasattr(_local, "room"):
        _local.room = memoryview(bytearray(_CHUNK_NBYTES))
    room: memoryview = _local.room
    return room
