"""Dagster sensors and schedules: one watched place per file; they decide when, never what."""
