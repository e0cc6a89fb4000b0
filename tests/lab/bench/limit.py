"""The physical limit of a merge: read so many bytes one after the other, write so many, fsync.

    python tests/lab/bench/limit.py [--direct] --read FILE:NBYTES … --write FILE:NBYTES

Not a merge: no byte is looked at. Reads are like `cat`'s, in order, in pieces of 1 MiB; the output
is written when all is read. With `--direct`, four threads read past the page cache while a fifth
writes, in pieces of 8 MiB: what the disk itself gives. It imports nothing that would take time to
start.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading

_PIECE_NBYTES = 1 << 20
_WINDOW_NBYTES = 16 << 20
_DIRECT_NBYTES = 8 << 20
_READERS = 4
_PAGE_NBYTES = 4096


def read(path: str, nbytes: int, piece: memoryview) -> None:
    """Read the first `nbytes` of a file into `piece`, again and again, and fetch no byte more.

    The kernel's own read-ahead would not stop where a part ends, so parts are asked for by window.
    """
    handle = os.open(path, os.O_RDONLY)
    whole = nbytes == os.fstat(handle).st_size
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL if whole else os.POSIX_FADV_RANDOM)
    at, asked = 0, nbytes if whole else 0
    while at < nbytes:
        if asked < nbytes and asked - at <= _WINDOW_NBYTES // 2:
            window = min(_WINDOW_NBYTES, nbytes - asked)
            os.posix_fadvise(handle, asked, window, os.POSIX_FADV_WILLNEED)
            asked += window
        got = os.preadv(handle, [piece[: nbytes - at]], at)
        if not got:
            raise EOFError(f"{path} ends {nbytes - at} bytes early")
        at += got
    os.close(handle)


def write(path: str, nbytes: int, piece: memoryview) -> None:
    """Write `piece` until the file has `nbytes`, then make it durable."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    while nbytes:
        nbytes -= os.write(handle, piece[:nbytes])
    os.fsync(handle)
    os.close(handle)


def in_order(reads: list[tuple[str, int]], writes: list[tuple[str, int]]) -> None:
    """Read so many bytes of these files one after the other, then write."""
    piece = memoryview(bytearray(_PIECE_NBYTES))
    for path, nbytes in reads:
        read(path, nbytes, piece)
    for path, nbytes in writes:
        write(path, nbytes, piece)


def direct(reads: list[tuple[str, int]], writes: list[tuple[str, int]]) -> None:
    """Read and write so many bytes of these files at the same time, past the page cache.

    Raises OSError (of the first thread that failed) where the file system cannot do that.
    """
    todo = [
        (path, at, min(_DIRECT_NBYTES, nbytes - at))
        for path, nbytes in reads
        for at in range(0, nbytes, _DIRECT_NBYTES)
    ][::-1]
    failed: list[Exception] = []

    def guarded(work: str) -> None:
        piece = mmap.mmap(-1, _DIRECT_NBYTES)  # aligned to pages, as O_DIRECT wants it
        try:
            if work == "read":
                _read_pieces(todo, piece)
            else:
                for path, nbytes in writes:
                    _write_direct(path, nbytes, piece)
        except Exception as error:
            failed.append(error)

    works = ["read"] * _READERS + ["write"]
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _read_pieces(todo: list[tuple[str, int, int]], piece: mmap.mmap) -> None:
    """Take pieces (path, start, bytes) from the end of a list that threads share, until it ends."""
    handles: dict[str, int] = {}
    while True:
        try:
            path, at, nbytes = todo.pop()
        except IndexError:
            break
        if path not in handles:
            handles[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
        pages = -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
        if os.preadv(handles[path], [memoryview(piece)[:pages]], at) < nbytes:
            raise EOFError(f"{path} ends before byte {at + nbytes}")
    for handle in handles.values():
        os.close(handle)


def _write_direct(path: str, nbytes: int, piece: mmap.mmap) -> None:
    """Write whole pages until the file has `nbytes`, then cut it there and make it durable."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    for at in range(0, nbytes, _DIRECT_NBYTES):
        pages = -(-min(_DIRECT_NBYTES, nbytes - at) // _PAGE_NBYTES) * _PAGE_NBYTES
        os.pwritev(handle, [memoryview(piece)[:pages]], at)
    os.ftruncate(handle, nbytes)
    os.fsync(handle)
    os.close(handle)


def main(arguments: list[str]) -> None:
    """`--read` and `--write` change what the files after them are for; `--direct` comes first."""
    past_cache = arguments[:1] == ["--direct"]
    reads: list[tuple[str, int]] = []
    writes: list[tuple[str, int]] = []
    files = reads
    for argument in arguments[past_cache:]:
        if argument in ("--read", "--write"):
            files = reads if argument == "--read" else writes
        else:
            path, _, nbytes = argument.rpartition(":")
            files.append((path, int(nbytes)))
    if past_cache:
        direct(reads, writes)
    else:
        in_order(reads, writes)


if __name__ == "__main__":
    main(sys.argv[1:])
