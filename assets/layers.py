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
"""

import time

import dagster as dg
from pydantic import Field

from assets.failures import told
from assets.labels import labels
from assets.metadata import layer_metadata, merge_metadata
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.resources import Engine, MergePipe
from mergepipe_pipeline.spec.outcome import LayerOutcome, Realised
from mergepipe_pipeline.spec.plan import LayerTask, MergePlan
from mergepipe_pipeline.verbs.deploy import current_plan, merge_recipe, refuse_other_budget


class Layers(dg.Config):
    """Which layers a run merges, as partitions of `layers` are called; all where none is named."""

    layers: list[str] = Field(default_factory=list)


def build_merge(card: RecipeFile) -> list[dg.AssetsDefinition]:
    """The assets `merge` and `layers` of a recipe."""
    shown = dg.AssetSpec(
        [card.name, "layers"],
        deps=[[card.name, "merge"]],
        partitions_def=dg.StaticPartitionsDefinition([partition(x) for x in card.layers]),
        description=(
            "The layers of the merged model, a partition each: what it is made from, by which "
            "operators, what that read, and whether it was reused. The asset merge reports them."
        ),
        **labels(card, "safetensors"),
    )
    return [_merge(card), dg.AssetsDefinition(specs=[shown])]


def partition(layer: str) -> str:
    """What the partition of a layer is called: `03` for `layer.03`; embed and head as they are."""
    return layer.removeprefix("layer.")


def _merge(card: RecipeFile) -> dg.AssetsDefinition:
    @dg.asset(
        key=[card.name, "merge"],
        deps=[[card.name, "plan"]],
        pool="disk_write",
        **labels(card, "python", "pytorch"),
    )
    @told
    def merge(
        context: dg.AssetExecutionContext, config: Layers, mergepipe: MergePipe, engine: Engine
    ) -> dg.MaterializeResult[None]:
        """Merges the layers that the plan changes and reuses the others.

        Each layer is reported in the asset layers as it ends, and kept: a run after a failure
        repeats none. To merge some only, name them in the configuration: `layers: ["03", "head"]`.
        """
        started = time.monotonic()
        plan = current_plan(mergepipe.warehouse, card.name)
        refuse_other_budget(plan, engine.budget)
        chosen = _chosen(plan, config.layers)
        done = []
        for one in merge_recipe(mergepipe.warehouse, card.name, list(chosen), engine.options):
            done.append(one)
            context.log_event(_reported(card, plan, chosen[one.name], one))
        return dg.MaterializeResult(
            data_version=dg.DataVersion(digest_json([layer.layer_key for layer in plan.layers])),
            metadata=merge_metadata(Realised.of(done), time.monotonic() - started),
        )

    return merge


def _chosen(plan: MergePlan, named: list[str]) -> dict[str, LayerTask]:
    """The layers to merge, by name. Raises NotFoundError for one that the plan does not have."""
    known = {partition(layer.name): layer for layer in plan.layers}
    unknown = [name for name in named if name not in known]
    if unknown:
        raise NotFoundError(
            "A recipe has no such layer",
            where=plan.recipe_name,
            expected=", ".join(known),
            found=", ".join(unknown),
            next_step="correct `layers` in the run's configuration",
        )
    return {known[name].name: known[name] for name in named or known}


def _reported(
    card: RecipeFile, plan: MergePlan, layer: LayerTask, done: LayerOutcome
) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        [card.name, "layers"],
        partition=partition(done.name),
        metadata=layer_metadata(plan, layer, done),
        tags={"dagster/data_version": done.layer_key},
    )
