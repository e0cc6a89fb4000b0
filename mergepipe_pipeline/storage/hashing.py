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
    """SHA-256 of a file's bytes. Raises CorruptionError unless it is a regular file, OSError."""
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
        running, buffer, at = new_hash(), _buffer(), 0
        while n := read_uncached(descriptor, at, buffer) or os.preadv(descriptor, [buffer], at):
            running.update(buffer[:n])
            at += n
            if progress:
                progress(n)
        return running.hexdigest()
    finally:
        os.close(descriptor)


def _buffer() -> memoryview:
    """This thread's buffer."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_CHUNK_NBYTES))
    buffer: memoryview = _local.buffer
    return buffer
