"""The asset in the place of those of a file that cannot be used."""

from collections.abc import Sequence

import dagster as dg

from mergepipe_pipeline.assets.labels import owners
from mergepipe_pipeline.assets.metadata import description
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.text import visible
from mergepipe_pipeline.verbs.standing_searches import StandingSearch


def problem_asset(
    file: RecipeFile | StandingSearch, first: str, deps: Sequence[dg.AssetDep] = ()
) -> dg.AssetsDefinition:
    """An asset that says why a recipe or search cannot be used, in the place of its `first` one."""
    spec = dg.AssetSpec(
        [file.name, first],
        deps=deps,
        description=description(file.problem or ""),
        metadata={"problem": dg.MetadataValue.text(visible(file.problem or ""))},
        group_name=file.identifier,
        owners=owners(),
        kinds={"problem"},
    )
    return dg.AssetsDefinition(specs=[spec])
