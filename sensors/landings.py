"""Watches what makes experts: the last checkpoint of each against what landed of it."""

from collections.abc import Mapping

import dagster as dg

from mergepipe_pipeline.assets.experts import EXPERTS_TAG
from mergepipe_pipeline.assets.landings import CHECKPOINT, Made, last_made
from mergepipe_pipeline.assets.place import Maker, Place
from mergepipe_pipeline.assets.running import WRITE_POOL
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.ticks import (
    ACTIVE,
    ATTEMPT_TAG,
    LOADING,
    SOON_S,
    Ours,
    asked,
    make_pool_known,
    request_or_reason_to_wait,
    separated,
    standing_sensor,
)
from mergepipe_pipeline.text import visible
from mergepipe_pipeline.verbs.land import is_to_land

#: The event of which a run lands the checkpoint.
_EVENT_TAG = "mergepipe/event"


def build_landing_sensor(
    makers: Mapping[str, Maker], job: dg.JobDefinition, place: Place
) -> dg.SensorDefinition:
    """The level-triggered sensor over what makers made."""

    @standing_sensor(
        "Lands the checkpoint of every asset that makes an expert, where its last materialisation "
        f"says by `{CHECKPOINT}` where that lies; its ticks say what landed, and what cannot.",
        SOON_S,
        [job],
        place,
    )
    def landing_sensor(
        context: dg.SensorEvaluationContext, mergepipe: MergePipe
    ) -> dg.SensorResult:
        """Requests the landing of every checkpoint that was made and has not landed."""
        ours = Ours.of(context, mergepipe, place)
        requests, lines = list[dg.RunRequest](), list[str]()
        make_pool_known(context.instance, WRITE_POOL)
        if not place.is_known(context):
            return dg.SensorResult(skip_reason=dg.SkipReason(LOADING))
        for name, maker in makers.items():
            said: dg.RunRequest | str
            try:
                made = last_made(context.instance, maker)
                if made is None or made.partition != maker.partition:
                    said = _unmade(context, maker, is_of_part=made is not None)
                else:
                    said = _request_or_reason(ours, mergepipe, name, made, job.name)
            except (MergePipeError, OSError) as error:  # it is this expert's alone
                said = str(error)
            if isinstance(said, dg.RunRequest):
                requests.append(said)
                said = f"a run is requested, attempt {said.tags[ATTEMPT_TAG]}"
            lines.append(visible(f"{name}: {said}"))
        return asked(context, requests, lines, separated(lines))

    return landing_sensor


def _request_or_reason(
    ours: Ours, mergepipe: MergePipe, name: str, made: Made, job: str
) -> dg.RunRequest | str:
    """A run that lands what was made last, or why none is asked for."""
    if not is_to_land(mergepipe.warehouse, name, made.path, made.event):
        return "what was made last has landed"
    tags = {EXPERTS_TAG: name, _EVENT_TAG: made.event}
    if ours.runs(ACTIVE, tags):
        return "a run lands it"
    key = f"{name}:{made.event}"
    return request_or_reason_to_wait(ours, key, tags, mergepipe.retry_s, job_name=job)


def _unmade(context: dg.SensorEvaluationContext, maker: Maker, *, is_of_part: bool) -> str:
    """Why a maker told of no checkpoint of ours; of other code locations, as far as events say."""
    shown, repository = maker.key.to_user_string(), context.repository_def
    if is_of_part:
        return f"{shown} has partitions; next: write which one makes this expert"
    if repository is not None and repository.asset_graph.has(maker.key):
        parts = repository.asset_graph.get(maker.key).partitions_def
        with dg.partition_loading_context(dynamic_partitions_store=context.instance):
            if maker.partition and parts and not parts.has_partition_key(maker.partition):
                return f"{shown} has no partition {maker.partition!r}"
    return f"no materialisation of {shown} says by `{CHECKPOINT}` where a checkpoint lies"
