"""The code location of another team on our instance: a training that says nothing while it runs."""

import time

import dagster as dg

_LOADED = str(time.time())


@dg.asset(partitions_def=dg.DynamicPartitionsDefinition(name="experts"))
def expert_run() -> None:
    """One of a set of partitions that is named as ours might be."""


@dg.asset
def training(context: dg.AssetExecutionContext) -> None:
    """Takes a while."""
    context.log.info("begin")
    time.sleep(8)


train = dg.define_asset_job("train", selection=[training])


@dg.sensor(job=train, minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def team_sensor() -> dg.RunRequest:
    """Asks for one run of each daemon: who kills a daemon kills its run, too."""
    return dg.RunRequest(_LOADED)


defs = dg.Definitions([expert_run, training], jobs=[train], sensors=[team_sensor])
