"""The asset family of landed checkpoints: one asset, one dynamic partition per expert."""

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import dagster as dg

from mergepipe_pipeline.assets.labels import owners
from mergepipe_pipeline.assets.metadata import dependents_link, description, gib
from mergepipe_pipeline.assets.place import ALONE, Maker, Place
from mergepipe_pipeline.assets.running import READ_POOL
from mergepipe_pipeline.deploy.arrivals import arrival
from mergepipe_pipeline.deploy.instance import identity_of, own_name
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, StandingFile
from mergepipe_pipeline.deploy.recorded import reason_to_wait_for
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.verbs.index import IndexedExpert, index_arrival
from mergepipe_pipeline.warehouse import Warehouse

#: The key of the asset whose partitions are the experts, in a code location of our own.
EXPERT_INDEX = ALONE.key("", "expert_index")

#: The tag of a run that names the experts it indexes, with commas between them.
EXPERTS_TAG = "mergepipe/experts"


def experts_of(warehouse: Warehouse) -> dg.DynamicPartitionsDefinition:
    """The experts of a warehouse; the name of the set is no other's on the instance."""
    return dg.DynamicPartitionsDefinition(name=own_name("experts", identity_of(warehouse)))


def index_key(place: Place) -> dg.AssetKey:
    """The key of the asset whose partitions are the experts."""
    return place.key("", "expert_index")


def experts_used(file: StandingFile, place: Place) -> list[dg.AssetDep]:
    """The partitions of the index that a recipe or search uses, and what makes these experts."""
    mapping = dg.SpecificPartitionsPartitionMapping(list(file.members))
    takes_more = isinstance(file, RecipeFile) and (file.selected or file.parsed is None)
    used = (maker for n, maker in place.makers.items() if takes_more or n in file.members)
    return [dg.AssetDep(index_key(place), partition_mapping=mapping), *_made_by(used)]


def _made_by(makers: Iterable[Maker]) -> Iterator[dg.AssetDep]:
    """One dep on each asset, on the partitions of it that make experts, or on all."""
    parts = dict[dg.AssetKey, list[str | None]]()
    for maker in makers:
        parts.setdefault(maker.key, []).append(maker.partition)
    for key, some in parts.items():
        chosen = [part for part in some if part is not None]
        is_of_parts = len(chosen) == len(some)
        mapping = dg.SpecificPartitionsPartitionMapping(chosen) if is_of_parts else None
        yield dg.AssetDep(key, partition_mapping=mapping)


def build_expert_index(
    experts: dg.DynamicPartitionsDefinition, place: Place = ALONE
) -> dg.AssetsDefinition:
    """The asset whose partitions are the experts."""
    key = index_key(place)

    @dg.asset(
        key=key,
        partitions_def=experts,
        group_name=place.group_of("catalog"),
        kinds={"python", "parquet"},
        owners=owners(),
        pool=READ_POOL,
        output_required=False,  # each partition has an event of its own
    )
    @place.bound
    def expert_index(
        context: dg.AssetExecutionContext, mergepipe: MergePipe
    ) -> Iterator[dg.MaterializeResult[None]]:
        """Makes a checkpoint that landed in the inbox known: headers, digests and block statistics.

        A partition is a checkpoint. Its data version is the digest of the contents: files touched
        without a change of a byte change nothing downstream. A failure is retried by inbox_sensor:
        three times, or for as long as storage, network or memory fail.
        """
        _index_each(context, mergepipe, key, context.partition_keys)
        yield from ()  # the events are logged: an output would be one more, that says nothing

    # Many partitions that a person asks for are one run.
    return expert_index.with_attributes(backfill_policy=dg.BackfillPolicy.single_run())


#: The name of the check that fails while recipes cannot use what lies under a name.
USABLE = "usable"


def build_usable(
    experts: dg.DynamicPartitionsDefinition, place: Place = ALONE
) -> dg.AssetChecksDefinition:
    """The check of each partition of the index, which inbox_sensor reports when it changes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)  # of partitions of a check

        @dg.asset_check(asset=index_key(place), name=USABLE, partitions_def=experts)
        @place.bound
        def usable(
            context: dg.AssetCheckExecutionContext, mergepipe: MergePipe
        ) -> dg.AssetCheckResult:
            """Recipes can use this checkpoint: it is whole, indexed as it is, not in quarantine.

            inbox_sensor reports when that changes.
            """
            why = reason_to_wait_for(mergepipe.warehouse, context.partition_keys)
            return dg.AssetCheckResult(passed=why is None, description=description(why or "It is."))

    return usable


class Burst(dg.Config):
    """Which experts one run indexes."""

    experts: list[str]


def _index_each(
    context: dg.OpExecutionContext | dg.AssetExecutionContext,
    mergepipe: MergePipe,
    key: dg.AssetKey,
    names: Sequence[str],
) -> None:
    """Index checkpoints one after the other, and report each as it ends.

    One that fails stops no other; the run fails at its end and names it.
    """
    failed = []
    for name in names:
        started = time.monotonic()
        try:
            done = index_arrival(mergepipe.warehouse, name, packs=mergepipe.packs)
        except (MergePipeError, OSError) as error:
            context.log_event(_problem(mergepipe.warehouse, key, name, error))
            failed.append(f"{name}: {error}" if len(names) > 1 else str(error))
            continue
        context.log_event(
            dg.AssetMaterialization(
                key,
                partition=name,
                metadata=_metadata(done, started),
                tags={"dagster/data_version": done.content_sha256},
            )
        )
    if failed:
        raise dg.Failure("\n".join(failed), allow_retries=False)


def build_burst(shards: int, place: Place = ALONE) -> dg.JobDefinition:
    """The job that indexes many experts, in so many steps that share them."""
    key = index_key(place)

    @dg.op(name=place.name("index_some"), pool=READ_POOL)
    @place.bound
    def index_some(context: dg.OpExecutionContext, config: Burst, mergepipe: MergePipe) -> None:
        """Index several checkpoints in one process; each is a partition of `expert_index`."""
        _index_each(context, mergepipe, key, config.experts)

    @dg.config_mapping
    def of_each_step(config: Burst) -> dict[str, Any]:
        return {
            f"shard_{n + 1:03d}": {"config": {"experts": config.experts[n::shards]}}
            for n in range(shards)
        }

    @dg.graph(name=place.name("index_several"), config=of_each_step)
    def several() -> None:
        for n in range(shards):
            index_some.alias(f"shard_{n + 1:03d}")()

    @dg.job(
        name=place.name("index_burst"),
        description="Indexes many experts that landed at once; a run for each would take longer.",
    )
    def index_burst() -> None:
        several()

    return index_burst


def _problem(
    warehouse: Warehouse, key: dg.AssetKey, name: str, error: MergePipeError | OSError
) -> dg.AssetObservation:
    known = arrival(warehouse, name)
    return dg.AssetObservation(
        key,
        partition=name,
        description=description(str(error)),
        metadata={
            "problem": str(error),
            "failures of this content": known.index.failures,
            "given up": known.index.is_given_up,
        },
    )


def _metadata(done: IndexedExpert, started: float) -> dict[str, Any]:
    checkpoint = done.registration.checkpoint
    return {
        "kind": checkpoint.kind,
        "version": done.registration.version,
        "tensors": len(checkpoint.tensors),
        "GiB": gib(checkpoint.nbytes),
        "content SHA-256": done.content_sha256,
        "layers": done.layers,
        "layers changed": len(done.layers_changed),
        "which layers changed": ", ".join(done.layers_changed) or "none",
        "bases": ", ".join(done.bases) or "none",
        "used by": dependents_link(done.registration.name),
        "path": dg.MetadataValue.path(checkpoint.root),
        "seconds to index": round(time.monotonic() - started, 3),
        **{f"pack against {p.base}": p.summary for p in done.packs},
        **({"packing failed": done.pack_error} if done.pack_error else {}),
    }
