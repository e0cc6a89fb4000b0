"""Dagster sensors and schedules: one watched place per file; they decide when, never what."""

import os


def interval_s(usual_s: int) -> int:
    """Seconds between the ticks of a sensor: MERGEPIPE_SENSOR_INTERVAL_S, or what is usual."""
    return int(os.environ.get("MERGEPIPE_SENSOR_INTERVAL_S", usual_s))
