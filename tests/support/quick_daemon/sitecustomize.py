"""For tests: a folder first on PYTHONPATH, which makes a daemon and its processes quick.

Sensors are looked at each second; Dagster's own pace, 5 s, is a constant. No write waits for the
disk, as no write of a test itself does: what kills these processes leaves the machine running. What
versions Dagster's tables have had is read once a process, not for each tick, where it takes most of
the time. Nothing else is changed.
"""

import os
import sqlite3
import sys
from functools import cache
from typing import Any

_connect: Any = sqlite3.dbapi2.connect


def _connect_without_waiting(*args: Any, **kwargs: Any) -> sqlite3.Connection:
    made: sqlite3.Connection = _connect(*args, **kwargs)
    made.execute("PRAGMA synchronous=OFF")
    return made


sqlite3.dbapi2.connect = sqlite3.connect = _connect_without_waiting  # type: ignore[assignment]
os.fsync = os.fstat  # type: ignore[assignment]

if "dagster._daemon" in sys.orig_argv:
    import dagster._daemon.sensor

    dagster._daemon.sensor.MIN_INTERVAL_LOOP_TIME = 1
if "grpc" in sys.orig_argv:
    from dagster._core.storage.sql import ScriptDirectory  # type: ignore[attr-defined]

    ScriptDirectory.from_config = cache(ScriptDirectory.from_config)  # type: ignore[method-assign]
