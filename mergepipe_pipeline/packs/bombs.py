"""Whether the tables of a pack from elsewhere can be read within what tables of their size need.

A few bytes of Parquet may unfold to gigabytes, and its own figures need not be true. So a process
with a bound of memory and time reads them first: what ends it would end no other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mergepipe_pipeline.errors import CorruptionError

_SCRIPT = Path(__file__).with_name("bounded_read.py")
#: Memory for what a table of any size needs, and for each byte of it: rows become objects.
_SPARE_NBYTES, _MOST_TIMES = 128 << 20, 32
#: Seconds for the start, and bytes per second.
_START_S, _SLOWEST = 60, 1_000_000


def refuse_bombs(root: Path) -> None:
    """Raise CorruptionError for a pack whose tables take more memory or time than they may."""
    paths = sorted(root.glob("*.parquet"))
    nbytes = sum(path.stat().st_size for path in paths)
    limit_s = _START_S + nbytes // _SLOWEST
    environment = {k: os.environ[k] for k in ("PATH", "LD_LIBRARY_PATH") if k in os.environ}
    most_nbytes = _SPARE_NBYTES + _MOST_TIMES * max((p.stat().st_size for p in paths), default=0)
    done = subprocess.run(
        [sys.executable, "-I", str(_SCRIPT), str(most_nbytes), str(limit_s), *map(str, paths)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        cwd="/",
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise CorruptionError(
            "The tables of a pack cannot be read within the memory that tables of their size need",
            where=str(root),
            expected=f"at most {most_nbytes} bytes of memory, and {limit_s} seconds",
            found=said[-1][:200] if said else f"exit status {done.returncode}",
            next_step="do not use it before you know who made it, and how",
        )
