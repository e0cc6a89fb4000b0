"""For tests: a folder first on PYTHONPATH, which makes daemons look at sensors each second.

Dagster's own pace, 5 s, is a constant. Nothing else of the daemon is changed.
"""

import sys

if "dagster._daemon" in sys.orig_argv:
    import dagster._daemon.sensor

    dagster._daemon.sensor.MIN_INTERVAL_LOOP_TIME = 1
