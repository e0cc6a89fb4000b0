"""The numbers of threads for each kind of work, which no other module decides, and memory.

Allocators keep freed memory for later allocations. Between planning, which holds statistics of all
experts, and merging, which holds windows, none is that large.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Whole files that are hashed at once: as many as keep a fast disk busy.
FILES = 2
#: Windows whose frames are read at once, past the page cache: as many as keep a fast disk busy.
READING = 4
#: Catalog files that are read or written at once.
CATALOG = 2
#: More threads of analysis only hold more windows: the hashes of one tensor are taken in order.
_MAX_ANALYSIS = 4


def cores() -> int:
    """The number of processors that this process may use, at least 1."""
    return len(os.sched_getaffinity(0)) or 1


def merging() -> int:
    """Windows merged at once: one per core, and one more because some wait for the disk."""
    return cores() + 1


def waiting() -> int:
    """Windows merged at once where all their bytes come from the disk: most wait for it."""
    return cores() + READING


def prepass() -> int:
    """Windows read for norms at once, by threads that read and add up in turn: most wait.

    dare_ties of 20 experts of 0.6B takes 24.9 s on 2 cores with 8, 29.0 s with 5.
    """
    return max(merging(), 2 * READING)


def analysis() -> int:
    """Windows analysed at once: with more than one per core they only evict each other."""
    return min(_MAX_ANALYSIS, cores())


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Load torch and keep its operations to one thread each; restores the number afterwards.

    For work that is parallel already: threads inside an operation would wait for each other. The
    number is this thread's own: others begin with it, but only torch's own loops there look at it,
    not the libraries that it calls, such as LAPACK.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def release_freed() -> None:
    """Return freed memory of Arrow and of the C library, where it can; costs milliseconds."""
    if arrow := sys.modules.get("pyarrow"):
        arrow.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def peak_nbytes() -> int:
    """The most bytes of memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
