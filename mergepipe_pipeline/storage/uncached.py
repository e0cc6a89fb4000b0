"""Large reads past the page cache, for bytes that are read once and would not fit into it.

A cold read through a full page cache costs 0.6 to 1.4 s of CPU per GB here, most of it for making
room; past it, 0.2 s. What is in the cache already is left to an ordinary read, and so is everything
where system or file system cannot do this.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.regular import open_regular

#: Smaller reads do not repay the extra calls.
_LEAST_NBYTES = 128 << 10
#: Offsets, lengths and addresses of direct reads are multiples of this on every usual disk.
_ALIGN = 4096
_CACHESTAT = 451  # the same number on every architecture

_local = threading.local()


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def fits_page_cache(nbytes: int) -> bool:
    """Whether `nbytes` leave half of the memory that is available now to others."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = dict(line.split(":", 1) for line in file)
        available = int(found["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return True
    return nbytes <= available // 2


def read_uncached(descriptor: int, start_byte: int, out: memoryview) -> int:
    """Fill the front of `out` from byte `start_byte` of an open file; how many bytes it filled.

    0 where an ordinary read is better or the only one.
    """
    if len(out) < _LEAST_NBYTES:
        return 0
    cached = cached_nbytes(descriptor, start_byte, len(out))
    if cached is None or 2 * cached > len(out):
        return 0
    first = start_byte // _ALIGN * _ALIGN
    room = _room(-(-(start_byte + len(out) - first) // _ALIGN) * _ALIGN)
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        found = os.preadv(direct, [room], first)
    except OSError:
        return 0
    finally:
        os.close(direct)
    n = max(0, min(len(out), found - (start_byte - first)))
    out[:n] = room[start_byte - first : start_byte - first + n]
    return n


def new_room(nbytes: int) -> mmap.mmap:
    """Aligned memory of this process alone: a shared one would be its forks' too."""
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def cached_nbytes(descriptor: int, start_byte: int, nbytes: int) -> int | None:
    """Bytes of the pages of a range that are in the page cache; None where Linux is before 6.5."""
    where, pages = _Range(start_byte, nbytes), _Pages()
    failed = _libc().syscall(
        _CACHESTAT, descriptor, ctypes.byref(where), ctypes.byref(pages), ctypes.c_uint(0)
    )
    return None if failed else int(pages.cached) * mmap.PAGESIZE


def cached_of_file(path: Path) -> tuple[int, int]:
    """Bytes of a file in the page cache (0 where the system does not say), and all its bytes.

    Both are 0 for what cannot be opened or is no regular file.
    """
    try:
        handle = open_regular(path, ("/",))
    except (OSError, CheckpointError):
        return 0, 0
    try:
        nbytes = os.fstat(handle).st_size
        return cached_nbytes(handle, 0, nbytes) or 0, nbytes
    finally:
        os.close(handle)


def _libc() -> ctypes.CDLL:
    if not hasattr(_local, "libc"):
        _local.libc = ctypes.CDLL(None)
    libc: ctypes.CDLL = _local.libc
    return libc


def _room(nbytes: int) -> memoryview:
    """Aligned room of this thread, used again for its next read."""
    if len(getattr(_local, "room", b"")) < nbytes:
        _local.room = memoryview(new_room(nbytes))
    room: memoryview = _local.room
    return room[:nbytes]
