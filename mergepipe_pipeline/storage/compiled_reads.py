"""Reads from open files in one compiled call, so that no other thread waits for the interpreter.

A window of a merge reads a piece of every expert. Read one by one, each asks for the interpreter's
lock some eight times, and threads that merge spend more time on handing it over than on reading.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from mergepipe_pipeline.arrays import I64Array, U8Array
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.storage.uncached import PAGE_NBYTES

#: Fields of a request: its kind, an open file, the first byte in it, how many bytes, and the
#: address they go to. A copy has no file, and begins at an address.
REQUEST_FIELDS = 5
#: Through the page cache; past it by way of scratch; past it into whole pages of their own; a copy.
CACHED, DIRECT, IN_PLACE, COPY = range(4)

#: Of the C library: file, address, bytes, place in the file; gives the bytes that it read.
pread: Any = types.ExternalFunction(
    "pread", types.int64(types.int32, types.uintp, types.uint64, types.int64)
)
#: Of the C library: address to, address from, bytes.
memcpy: Any = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uint64))


@cached_njit(nogil=True)
def run_all(requests: I64Array, scratch: U8Array) -> int:
    """Do `requests` [n, REQUEST_FIELDS] in order; returns how many were done before one failed.

    `scratch` begins at a page and has whole pages.
    """
    for r in range(len(requests)):
        kind, file, start, nbytes, address = requests[r]
        if kind == COPY:
            memcpy(np.uint64(address), np.uint64(start), np.uint64(nbytes))
        elif kind == CACHED:
            if not _read(file, start, nbytes, address):
                return r
        elif kind == IN_PLACE:
            lead = start % PAGE_NBYTES
            size = pages_nbytes(lead + nbytes)
            n_read = pread(file, np.uint64(address - lead), np.uint64(size), start - lead)
            if n_read - lead < nbytes:
                return r
        elif not _read_by_scratch(file, start, nbytes, address, scratch):
            return r
    return len(requests)


@cached_njit(nogil=True)
def _read(file: int, start: int, nbytes: int, address: int) -> bool:
    done = 0
    while done < nbytes:
        n_read = pread(file, np.uint64(address + done), np.uint64(nbytes - done), start + done)
        if n_read <= 0:
            return False
        done += n_read
    return True


@cached_njit(nogil=True)
def _read_by_scratch(file: int, start: int, nbytes: int, address: int, scratch: U8Array) -> bool:
    place, done = np.uint64(scratch.ctypes.data), 0
    while done < nbytes:
        lead = (start + done) % PAGE_NBYTES
        size = min(len(scratch), pages_nbytes(lead + nbytes - done))
        n_read = pread(file, place, np.uint64(size), start + done - lead) - lead
        if n_read <= 0:
            return False
        n = min(n_read, nbytes - done)
        memcpy(np.uint64(address + done), place + np.uint64(lead), np.uint64(n))
        done += n
    return True


@cached_njit(nogil=True, inline="always")
def pages_nbytes(n: int) -> int:
    """Bytes of the whole pages that n bytes from a page's start on lie in."""
    return -(-n // PAGE_NBYTES) * PAGE_NBYTES
