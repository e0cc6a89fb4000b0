"""Large reads and writes past the page cache, of bytes that are used once and would not fit.

A cold read through a full page cache costs 0.6 to 1.4 s of CPU per GB here, most of it for making
room; past it, 0.2 s. Bytes that are in the cache already are read ordinarily, and so is everything
where system or file system cannot do this.

What a merge writes is read by others later, if at all. 1.2 GB through the page cache cost 1.5 to
2.6 s of CPU here, and past it 0.05 s; durable after 0.5 s, not 1.9 to 3.0.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from functools import partial
from pathlib import Path

from mergepipe_pipeline.concurrency.workers import FreeList, TaskQueue, Workers

#: Smaller reads do not repay the extra calls.
_LEAST_NBYTES = 128 << 10
#: Offsets, lengths and addresses of direct reads are multiples of this on every usual disk.
PAGE_NBYTES = 4096
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
            meminfo = dict(line.split(":", 1) for line in file)
        available = int(meminfo["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return True
    return nbytes <= available // 2


def read_uncached(descriptor: int, start_byte: int, out: memoryview) -> int:
    """Fill the front of `out` from byte `start_byte` of an open file; how many bytes it filled.

    0 where an ordinary read is better or the only one.
    """
    if not is_long(len(out)) or not is_cold(descriptor, start_byte, len(out)):
        return 0
    buffer = scratch_pages(pages_nbytes(start_byte, len(out)))
    try:
        direct = open_direct(descriptor)
    except OSError:
        return 0
    try:
        n = read_pages(direct, start_byte, len(out), buffer)
    finally:
        os.close(direct)
    if n:
        lead = start_byte % PAGE_NBYTES
        copy_bytes(buffer[lead : lead + n], out[:n])
    return n


def is_long(nbytes: int) -> bool:
    """Whether a read past the page cache repays its extra work."""
    return nbytes >= _LEAST_NBYTES


def copy_bytes(source: memoryview, out: memoryview) -> None:
    """Fill `out` with as many bytes; other threads go on meanwhile."""
    import numpy as np  # commands start without it

    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))


def open_direct(descriptor: int) -> int:
    """A descriptor of the same file that reads past the page cache. Raises OSError."""
    path = f"/proc/self/fd/{descriptor}"
    return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)


def read_pages(direct: int, start_byte: int, nbytes: int, buffer: memoryview) -> int:
    """Read bytes from `start_byte` on; how many it read.

    They come to lie in `buffer` as in their page. It begins at a page's address and has
    `pages_nbytes`. Gives 0 where an ordinary read is needed.
    """
    lead, size = start_byte % PAGE_NBYTES, pages_nbytes(start_byte, nbytes)
    try:
        n_read = os.preadv(direct, [buffer[:size]], start_byte - lead)
    except OSError:
        return 0
    return max(0, min(nbytes, n_read - lead))


def is_cold(descriptor: int, start_byte: int, nbytes: int) -> bool:
    """Whether at most half of these bytes are in the page cache; False where it is not known."""
    cached = cached_nbytes(descriptor, start_byte, nbytes)
    return cached is not None and 2 * cached <= nbytes


def pages_nbytes(start_byte: int, nbytes: int) -> int:
    """Bytes of the pages of a file that bytes [start, start + n) lie in."""
    return -(-(start_byte % PAGE_NBYTES + nbytes) // PAGE_NBYTES) * PAGE_NBYTES


def page_aligned(nbytes: int) -> mmap.mmap:
    """Aligned memory of this process alone: a shared one would be its forks' too."""
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def cached_nbytes(descriptor: int, start_byte: int, nbytes: int) -> int | None:
    """Bytes of the pages of a range that are in the page cache; None where Linux is before 6.5."""
    where, pages = _Range(start_byte, nbytes), _Pages()
    failed = _libc().syscall(
        _CACHESTAT, descriptor, ctypes.byref(where), ctypes.byref(pages), ctypes.c_uint(0)
    )
    return None if failed else int(pages.cached) * mmap.PAGESIZE


def _libc() -> ctypes.PyDLL:
    if not hasattr(_local, "libc"):
        # A call this short keeps the interpreter's lock: waiting to get it again costs more.
        _local.libc = ctypes.PyDLL(None)
    libc: ctypes.PyDLL = _local.libc
    return libc


def scratch_pages(nbytes: int) -> memoryview:
    """Memory of this thread from a page's address on, used again by its next call."""
    if len(getattr(_local, "buffer", b"")) < nbytes:
        _local.buffer = memoryview(page_aligned(nbytes))
    buffer: memoryview = _local.buffer
    return buffer[:nbytes]


#: Bytes of one write; a multiple of what disks ask offsets and addresses to be aligned to.
_PIECE_NBYTES = 4 << 20
_ALIGN = 4096
#: Pieces that may wait for the disk.
_WAITING = 3
#: What the kernel says where a file cannot be written directly.
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)

#: Aligned room for pieces, of which some is kept: fresh pages cost more than the copy.
_pieces = FreeList(partial(page_aligned, _PIECE_NBYTES), max_free=_WAITING + 1)


class DirectFile:
    """A new file of `nbytes` at `path`, whose space is reserved at once.

    It ends with `close`, or with `abandon`, which leaves it as it is. Raises OSError:
    FileExistsError, a full disk.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            if nbytes:
                os.posix_fallocate(self._handle, 0, nbytes)
        except BaseException:
            os.close(self._handle)
            path.unlink()
            raise
        self._writer = Workers(1)
        self._writes: TaskQueue[None] = self._writer.queue()
        self._piece = _pieces.take()
        self._filled = self._at = 0
        self._is_direct = nbytes >= _PIECE_NBYTES and self._set_direct(True)

    def append(self, data: memoryview) -> None:
        """Write `data`, bytes, next. Raises OSError for this or what was written before."""
        while len(data):
            n = min(len(data), _PIECE_NBYTES - self._filled)
            copy_bytes(data[:n], memoryview(self._piece)[self._filled : self._filled + n])
            self._filled, data = self._filled + n, data[n:]
            if self._filled == _PIECE_NBYTES:
                self._send()

    def close(self) -> None:
        """Write the rest and close the file; only fsync makes it durable. Raises as `append`."""
        try:
            self._send()
            for _ in self._writes.rest():
                pass
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._writer.close()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            _pieces.give_back(self._piece)

    def _send(self) -> None:
        """Leave the piece to the writing thread and take another."""
        self._writes.put(partial(self._write, self._piece, self._filled, self._at))
        self._at += self._filled
        self._piece, self._filled = _pieces.take(), 0
        for _ in self._writes.rest(_WAITING):
            pass

    def _write(self, piece: mmap.mmap, nbytes: int, at: int) -> None:
        try:
            with memoryview(piece) as view:
                done = 0
                while done < nbytes:
                    if self._is_direct and (done % _ALIGN or nbytes - done < _ALIGN):
                        self._is_direct = self._set_direct(False)
                    stop = nbytes // _ALIGN * _ALIGN if self._is_direct else nbytes
                    done += self._written(view[done:stop], at + done)
        finally:
            _pieces.give_back(piece)

    def _written(self, part: memoryview, at: int) -> int:
        try:
            return os.pwrite(self._handle, part, at)
        except OSError as error:
            if not self._is_direct or error.errno not in _REFUSED:
                raise
            self._is_direct = self._set_direct(False)
            return 0

    def _set_direct(self, on: bool) -> bool:
        """Turn direct writing on or off; returns whether the file is now written directly."""
        direct: int = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
        except OSError:
            return False
        return on and direct != 0
