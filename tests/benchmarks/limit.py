"""The physical limit of a merge: read so many bytes one after the other, write so many, fsync.

    python tests/benchmarks/limit.py --read FILE:NBYTES … --write FILE:NBYTES

Not a merge: no byte is looked at. Reads are like `cat`'s, in order, in pieces of 1 MiB; the output
is written when all is read. It imports nothing that would take time to start.
"""

from __future__ import annotations

import os
import sys

_PIECE_NBYTES = 1 << 20
_WINDOW_NBYTES = 16 << 20


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


def main(arguments: list[str]) -> None:
    """`--read` and `--write` change what the files after them are for."""
    piece = memoryview(bytearray(_PIECE_NBYTES))
    todo = read
    for argument in arguments:
        if argument in ("--read", "--write"):
            todo = read if argument == "--read" else write
        else:
            path, _, nbytes = argument.rpartition(":")
            todo(path, int(nbytes), piece)


if __name__ == "__main__":
    main(sys.argv[1:])
