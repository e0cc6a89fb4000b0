"""A new file written front to back past the page cache, by a thread of its own.

What a merge writes is read by others later, if at all. 1.2 GB through the page cache cost 1.5 to
2.6 s of CPU here, most of it for making room, and past it 0.05 s; durable after 0.5 s, not 1.9 to
3.0. Where the file system cannot do this, and for small files, writes are ordinary ones.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from functools import partial
from pathlib import Path

from mergepipe_pipeline.concurrency.free_list import FreeList
from mergepipe_pipeline.concurrency.workers import TaskQueue, Workers
from mergepipe_pipeline.storage.uncached import page_aligned

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
            self._piece[self._filled : self._filled + n] = data[:n]
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
