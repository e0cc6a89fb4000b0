"""Whether a file looks as if its maker had not written all of it: holes, or nothing but zeros.

Downloads that reserve their space first have the right length from the start. A sound file may look
the same, so this is a hint, not a verdict.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_TAIL_NBYTES = 4096


def unwritten(path: Path) -> str | None:
    """In a few words what looks unwritten in a file, or None. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(handle).st_size
        hole = _first_hole(handle, nbytes)
        if hole < nbytes:
            return f"has a hole at byte {hole} of {nbytes}"
        start = max(0, nbytes - _TAIL_NBYTES)
        if nbytes and not any(os.pread(handle, nbytes - start, start)):
            return f"holds nothing but zeros from byte {start} of {nbytes}"
        return None
    finally:
        os.close(handle)


def _first_hole(handle: int, nbytes: int) -> int:
    """Where the first hole begins; `nbytes` if there is none or it cannot be known."""
    try:
        return os.lseek(handle, 0, os.SEEK_HOLE) if nbytes else 0
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENXIO, errno.EOPNOTSUPP):
            return nbytes
        raise
