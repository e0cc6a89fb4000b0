"""What stands between a recipe's snapshot and its release: measurements, and the gate.

Recipes without `evaluate:` have neither.
"""

import dagster as dg

from mergepipe_pipeline.assets.failures import as_failure
from mergepipe_pipeline.assets.labels import asset_of
from mergepipe_pipeline.assets.metadata import description, gate_metadata, metrics_metadata
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.verbs.deploy import evaluate_recipe, judge_recipe


def build_evaluation(file: RecipeFile) -> list[dg.AssetsDefinition | dg.AssetChecksDefinition]:
    """The asset `evaluation` of a recipe and its check `gate`, where the recipe asks for them."""
    if file.recipe.evaluator is None:
        return []
    return [_evaluation(file), *([_gate(file)] if file.recipe.gate is not None else [])]


def _evaluation(file: RecipeFile) -> dg.AssetsDefinition:
    @asset_of(file, "python", after=["snapshot"])
    def evaluation(mergepipe: MergePipe) -> dg.MaterializeResult[None]:
        """Measures the snapshot as the recipe's `evaluate:` says; each metric has a plot.

        A snapshot is measured once; what was measured is kept with the evaluator's log.
        """
        measured, log = evaluate_recipe(mergepipe.warehouse, file)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(f"{measured.snapshot_id}-{measured.evaluator_id}"),
            metadata={
                "snapshot id": measured.snapshot_id,
                "evaluator": measured.evaluator,
                "log": dg.MetadataValue.path(str(log)),
                "measured": measured.created,
                "seconds to evaluate": measured.seconds,
                **metrics_metadata(measured.metrics),
            },
        )

    return evaluation


def _gate(file: RecipeFile) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=dg.AssetKey([file.name, "evaluation"]), blocking=True, name="gate")
    @as_failure
    def gate(mergepipe: MergePipe) -> dg.AssetCheckResult:
        """The metrics are what the recipe's `gate:` asks for; else the ref stays as it is."""
        verdict = judge_recipe(mergepipe.warehouse, file).verdict
        assert verdict is not None
        sentences = [verdict.summary, verdict.since, "" if verdict.passed else _next(file)]
        return dg.AssetCheckResult(
            passed=verdict.passed,
            description=description("; ".join(filter(None, sentences))),
            metadata={
                **gate_metadata(verdict),
                "snapshot id": verdict.snapshot_id,
                "live snapshot id": verdict.live_snapshot_id or "none",
            },
        )

    return gate


def _next(file: RecipeFile) -> str:
    """What a person does, or need not do, about a refusal."""
    gate = file.recipe.gate
    if gate is not None and gate.on_failure == "bisect":
        return "next: bisect_sensor finds the suspect and keeps it out until it changes"
    return f"next: mend what changed, or find the suspect: `mergepipe bisect {file.name}`"
