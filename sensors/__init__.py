"""Dagster sensors and schedules: one watched place per file; they decide when, never what."""

from collections.abc import Sequence

from mergepipe_pipeline.settings import SENSOR_INTERVAL

#: For sensors that somebody waits for. Dagster looks every 5 s: with 5 here, a tick that began late
#: in one look would be skipped in the next.
SOON_S = 4

#: Lines of which a tick that asks for nothing tells: every one is stored.
MAX_LINES = 20

#: Why nothing is asked for that definitions are needed for.
LOADING = "its definitions are being loaded"

#: Places in the queue, the highest first. Merges, single arrivals and what a person starts have 0.
BURST_PRIORITY, NIGHTLY_PRIORITY = "-1", "-2"


def interval_s(usual_s: int) -> int:
    """Seconds between the ticks of a sensor, as its setting says, or what is usual."""
    return SENSOR_INTERVAL.value() or usual_s


def separated(reasons: Sequence[str]) -> str:
    """Reasons of a tick, each on a line with a dot before it: the UI shows all in one line."""
    return "".join(reasons) if len(reasons) < 2 else "\n".join(f"• {r}" for r in reasons)
