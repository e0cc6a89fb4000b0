"""What follows a refusal, where a recipe asks for it: find the suspect and keep it out."""

from typing import Any

import dagster as dg

from mergepipe_pipeline.assets.labels import asset_of
from mergepipe_pipeline.assets.metadata import markdown_table, plain_name
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.resources import Engine, MergePipe
from mergepipe_pipeline.text import in_one_line
from mergepipe_pipeline.verbs.trace import Traced, trace_refusal


def is_traced(file: RecipeFile) -> bool:
    """Whether the recipe says `on_failure: bisect`."""
    gate = file.recipe.gate
    return gate is not None and gate.on_failure == "bisect"


def build_bisect(file: RecipeFile) -> list[dg.AssetsDefinition]:
    """The asset `bisect` of a recipe that has its refusals traced."""
    if not is_traced(file):
        return []

    @asset_of(file, "python", after=["evaluation"], pool="disk_write")
    def bisect(
        context: dg.AssetExecutionContext, mergepipe: MergePipe, engine: Engine
    ) -> dg.MaterializeResult[None]:
        """Finds which expert made the refused snapshot worse, and quarantines its content.

        Recipes that name the expert wait then, and what is live stays; another version of it is
        merged by itself. Not part of the recipe's own job: bisect_sensor starts it.
        """
        traced = trace_refusal(
            mergepipe.warehouse, file, options=engine.options, tell=context.log.info
        )
        return dg.MaterializeResult(metadata=_metadata(traced))

    return [bisect]


def build_bisect_job(file: RecipeFile) -> Any | None:
    """The job that traces a recipe's refusals; None for a recipe that asks for nothing."""
    if not is_traced(file):
        return None
    return dg.define_asset_job(
        f"bisect_{file.identifier}",
        selection=dg.AssetSelection.assets([file.name, "bisect"]),
        description=f"Finds the expert that made {file.name} fail its gate, and quarantines it.",
        tags={"mergepipe/recipe": file.name},
    )


def _metadata(traced: Traced | None) -> dict[str, Any]:
    if traced is None:
        return {"found": "nothing is refused at present"}
    done, regression = traced.bisection, traced.prepared.regression
    rows = [
        (
            ", ".join(map(plain_name, c.undone)),
            "all" if c.layers is None else ", ".join(c.layers),
            "yes" if c.passed else "no",
            in_one_line(c.summary),
        )
        for c in done.candidates
    ]
    return {
        "found": in_one_line(done.summary),
        "quarantined": traced.quarantine.name if traced.quarantine else "none",
        "refused": in_one_line(done.verdict),
        "changed": in_one_line(regression.changes.summary),
        "cost at most": traced.prepared.cost.summary,
        "candidates": markdown_table(("undone", "in layers", "passes", "the gate says"), rows),
        "refused snapshot id": done.refused,
        "live snapshot id": done.live,
    }
