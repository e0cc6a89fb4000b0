"""Gives the system back what planning has freed, so that a merge does not hold both.

Allocators keep freed memory for the next one who asks. Between planning, which holds statistics of
all experts, and merging, which holds windows, nobody will ask for that much.
"""

from __future__ import annotations

import ctypes
import sys


def release_freed() -> None:
    """Return freed memory of Arrow and of the C library, where it can; costs milliseconds."""
    if arrow := sys.modules.get("pyarrow"):
        arrow.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
