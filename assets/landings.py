"""What assets of others make lands by itself: they say where, in the metadata of an event."""

from collections.abc import Mapping
from typing import NamedTuple

import dagster as dg

from mergepipe_pipeline.assets.experts import EXPERTS_TAG
from mergepipe_pipeline.assets.labels import failing
from mergepipe_pipeline.assets.place import Maker, Place
from mergepipe_pipeline.assets.running import WRITE_POOL
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.verbs.land import land_for

#: The metadata of a materialisation that says where the checkpoint lies that it made.
CHECKPOINT = "mergepipe/checkpoint"
#: Materialisations without it that may follow one that has it, as those which a person reports.
_LATER = 10


class Made(NamedTuple):
    """Where a checkpoint lies, and the event that said so, which no other one is called."""

    path: str
    event: str
    partition: str | None


def last_made(instance: dg.DagsterInstance, maker: Maker) -> Made | None:
    """The last checkpoint that a maker made and does not land itself."""
    parts = None if maker.partition is None else [maker.partition]
    wanted = dg.AssetRecordsFilter(maker.key, asset_partitions=parts)
    for record in instance.fetch_materializations(wanted, limit=_LATER).records:
        made = record.asset_materialization
        said = made.metadata.get(CHECKPOINT) if made else None
        if said is not None:
            event = f"{record.run_id or 'reported'} {record.timestamp}"
            return Made(str(said.value), event, record.partition_key)
    return None


def build_landing_job(makers: Mapping[str, Maker], place: Place) -> dg.JobDefinition:
    """The job that lands what makers made: of the experts that a run's tag names, or of all."""
    name, sensor = map(place.sensor, ("land_experts", "landing_sensor"))

    @dg.op(name=f"{name}__land", pool=WRITE_POOL)
    @place.bound
    @failing()
    def land(context: dg.OpExecutionContext, mergepipe: MergePipe) -> None:
        """Copies each checkpoint into the inbox, which gets it whole, once for each event."""
        said = context.run.tags.get(EXPERTS_TAG)
        for expert in [said] if said else makers:
            made = last_made(context.instance, makers[expert])
            if made is not None:
                done = land_for(mergepipe.warehouse, expert, made.path, made.event)
                context.log.info(f"{expert}: {done or 'it has landed before'}")

    @dg.job(
        name=name,
        tags=place.tags,
        description=f"Lands what assets made that say where; {sensor} starts it.",
    )
    def land_experts() -> None:
        land()

    return land_experts
