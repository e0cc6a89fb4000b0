"""When the disk is cleared: once a day, at a time when few nightly merges run."""

import dagster as dg

from mergepipe_pipeline.assets.space import free_space

space_job = dg.define_asset_job(
    "collect",
    selection=dg.AssetSelection.assets(free_space),
    description="Removes what nobody needs, as `mergepipe gc` does; space_daily starts it.",
)
space_daily = dg.ScheduleDefinition(
    name="space_daily",
    job=space_job,
    cron_schedule="40 4 * * *",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Frees the space of what nobody needs, once a day (UTC).",
)
