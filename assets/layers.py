"""The merge of one recipe: one asset that runs, and one that shows its layers as partitions.

A model of 80 layers as 80 assets buries the assets that matter: five such recipes are 410 rows in
the catalog, and the page of a recipe is a wall of edges. Partitions that Dagster itself runs cost
more than they give: at the end of a step Dagster reports every partition of it once more, with one
data version for all and without metadata; runs with partitions have to be started as such; and
"Materialize all" becomes a backfill of several runs that wait for each other.

So `layers` is an asset that Dagster does not run. `merge` reports a partition of it as each layer
ends, with the layer's key as data version. Which layers are merged and which reused, the action
cache decides, layer by layer, so that a run after a failure repeats nothing; who wants some layers
only names them in the configuration of `merge`.

`merge` is a graph: MERGEPIPE_SHARDS steps that merge a shard each, wherever the executor puts them,
and one that gathers. Steps hand each other nothing: what they share lies in the warehouse, which
all machines see, unlike the folder of Dagster's instance.
"""

import time
from typing import Any

import dagster as dg
from pydantic import Field

from mergepipe_pipeline.assets.labels import failing, labels
from mergepipe_pipeline.assets.metadata import (
    layer_metadata,
    shard_metadata,
    shards_metadata,
)
from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.deploy.instance import own_name
from mergepipe_pipeline.deploy.messages import ShardTask
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.deploy.shards import merged_layers, shard_of
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.outcome import LayerOutcome
from mergepipe_pipeline.domain.plan import LayerTask, MergePlan
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.resources import Engine, MergePipe
from mergepipe_pipeline.verbs.deploy import (
    current_plan,
    merge_recipe,
    refuse_other_budget,
)


class Layers(dg.Config):
    """Which layers a run merges, as partitions of `layers` are called; all where none is named.

    And how many of the steps share the work: all where nothing is said.
    """

    layers: list[str] = Field(default_factory=list)
    shards: int | None = Field(default=None, ge=1)


class OneShard(Layers):
    """Which of the shards a step merges, from 1."""

    number: int


def build_merge(
    file: RecipeFile, shards: int = 1, place: Place = ALONE
) -> list[dg.AssetsDefinition]:
    """The assets `merge`, of so many steps that share the work, and `layers` of a recipe."""
    shown = dg.AssetSpec(
        place.key(file.name, "layers"),
        deps=[place.key(file.name, "merge")],
        partitions_def=_partitions(file, place),
        description=(
            "The layers of the merged model, a partition each: what it is made from, by which "
            "operators, what that read, and whether it was reused. The asset merge reports them."
        ),
        **labels(file, "safetensors", place=place),
    )
    return [_merge(file, shards, place), dg.AssetsDefinition(specs=[shown])]


def partition(layer: str) -> str:
    """The name of a layer's partition: `03` for `layer.03`; embed and head as they are."""
    return layer.removeprefix("layer.")


def _partitions(file: RecipeFile, place: Place) -> dg.PartitionsDefinition[str]:
    """The layers. Definitions of a guest load once, before they are known: a run says which."""
    if place.identity is None:
        return dg.StaticPartitionsDefinition([partition(x) for x in file.layers])
    return dg.DynamicPartitionsDefinition(name=own_name(f"{file.name} layers", place.identity))


def _merge(file: RecipeFile, shards: int, place: Place) -> dg.AssetsDefinition:
    shard, gather = _shard(file, shards, place), _gather(file, place)
    numbers = {f"shard_{number:03d}": number for number in range(1, shards + 1)}

    @dg.config_mapping
    def of_each_step(config: Layers) -> dict[str, Any]:
        said = {"layers": config.layers, "shards": min(config.shards or shards, shards)}
        parts = {name: {"config": {**said, "number": n}} for name, n in numbers.items()}
        return {**parts, "gather": {"config": said}}

    @dg.graph_asset(
        key=place.key(file.name, "merge"),
        ins={"plan": dg.AssetIn(place.key(file.name, "plan"), dagster_type=dg.Nothing)},
        config=of_each_step,
        description=(
            "Merges the layers that the plan changes, and reuses the others. Each step merges a "
            "shard of about the same cost, reports its layers as they end in the asset layers, and "
            "keeps them: a run after a failure repeats none. The configuration may name some "
            '(`layers: ["03", "head"]`), and how many `shards` share the work.'
        ),
        **labels(file, "python", "pytorch", place=place),
    )
    def merge(plan: Any) -> Any:
        return gather.alias("gather")([shard.alias(name)(plan) for name in numbers])

    return merge


def _shard(file: RecipeFile, shards: int, place: Place) -> dg.OpDefinition:
    @dg.op(
        name=place.name(f"{file.identifier}__shard"),
        ins={"plan": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing),
        pool=place.running.pool,
        tags=place.running.op_tags,
    )
    @place.bound
    @failing()
    def shard(
        context: dg.OpExecutionContext, config: OneShard, mergepipe: MergePipe, engine: Engine
    ) -> dg.Output[None]:
        """Merges one shard of the plan's layers, while other steps merge the others."""
        started = time.monotonic()
        plan, chosen = _asked(file, mergepipe, engine, config)
        key = _shown(context.instance, file, plan, place)
        part = shard_of(plan, config.number, config.shards or shards, list(chosen))
        task = ShardTask(file.name, plan.plan_id, part, engine.options)
        done = list[LayerOutcome]()

        def tell(one: LayerOutcome) -> None:
            done.append(one)
            context.log_event(_reported(key, plan, chosen[one.name], one))

        place.running.merge(context, mergepipe.warehouse, task, tell)
        records = merged_layers(mergepipe.warehouse, file.name, plan)
        held = max((r.held_nbytes for r in records if r.shard == part.number), default=0)
        metadata = shard_metadata(part, done, held, time.monotonic() - started)
        return dg.Output(None, metadata=metadata)

    return shard


def _gather(file: RecipeFile, place: Place) -> dg.OpDefinition:
    @dg.op(
        name=place.name(f"{file.identifier}__gather"),
        ins={"shards": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing),
        pool=place.running.pool,
        tags=place.running.op_tags,
    )
    @place.bound
    @failing()
    def gather(
        context: dg.OpExecutionContext, config: Layers, mergepipe: MergePipe, engine: Engine
    ) -> dg.Output[None]:
        """Says what all shards cost; merges what none of them has."""
        plan, chosen = _asked(file, mergepipe, engine, config)
        key = _shown(context.instance, file, plan, place)
        for one in merge_recipe(mergepipe.warehouse, file.name, list(chosen), engine.options):
            if not one.reused:
                context.log_event(_reported(key, plan, chosen[one.name], one))
        return dg.Output(
            None,
            data_version=dg.DataVersion(digest_json([layer.layer_key for layer in plan.layers])),
            metadata=shards_metadata(merged_layers(mergepipe.warehouse, file.name, plan)),
        )

    return gather


def _asked(
    file: RecipeFile, mergepipe: MergePipe, engine: Engine, config: Layers
) -> tuple[MergePlan, dict[str, LayerTask]]:
    """The current plan, and the layers of it that a run is to merge, by name.

    Raises BudgetError, and NotFoundError for a layer that the plan does not have.
    """
    plan = current_plan(mergepipe.warehouse, file.name)
    refuse_other_budget(plan, engine.budget)
    known = {partition(layer.name): layer for layer in plan.layers}
    unknown = [name for name in config.layers if name not in known]
    if unknown:
        raise NotFoundError(
            "A recipe has no such layer",
            where=plan.recipe_name,
            expected=", ".join(known),
            found=", ".join(unknown),
            next_step="correct `layers` in the run's configuration",
        )
    return plan, {known[name].name: known[name] for name in config.layers or known}


def _shown(
    instance: dg.DagsterInstance, file: RecipeFile, plan: MergePlan, place: Place
) -> dg.AssetKey:
    """The asset that shows the layers of a plan, all of them as partitions."""
    layers = _partitions(file, place)
    if isinstance(layers, dg.DynamicPartitionsDefinition) and layers.name is not None:
        instance.add_dynamic_partitions(layers.name, [partition(x.name) for x in plan.layers])
    return place.key(file.name, "layers")


def _reported(
    key: dg.AssetKey, plan: MergePlan, layer: LayerTask, done: LayerOutcome
) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        key,
        partition=partition(done.name),
        metadata=layer_metadata(plan, layer, done),
        tags={"dagster/data_version": done.layer_key},
    )
