"""Memory of this process: the most it has held, and returning what it has freed.

Allocators keep freed memory for later allocations. Between planning, which holds statistics of all
experts, and merging, which holds windows, none is that large.
"""

from __future__ import annotations

import ctypes
import resource
import sys


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
