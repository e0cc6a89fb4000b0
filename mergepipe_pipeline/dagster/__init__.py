"""The public door for projects of others: resource, builders, components, translator."""

from dagster_shared.libraries import DagsterLibraryRegistry

from mergepipe_pipeline import __version__
from mergepipe_pipeline.assets.place import MergePipeProps, MergePipeTranslator
from mergepipe_pipeline.dagster.components import (
    HousekeepingComponent,
    InboxComponent,
    KeptRecipesComponent,
    MergeRecipeComponent,
    SearchComponent,
    WindowComponent,
)
from mergepipe_pipeline.dagster.door import (
    build_housekeeping,
    build_inbox_defs,
    build_recipe_defs,
    build_search_defs,
    build_window_defs,
)
from mergepipe_pipeline.resources import MergePipe as MergePipeResource

__all__ = [
    "HousekeepingComponent",
    "InboxComponent",
    "KeptRecipesComponent",
    "MergePipeProps",
    "MergePipeResource",
    "MergePipeTranslator",
    "MergeRecipeComponent",
    "SearchComponent",
    "WindowComponent",
    "build_housekeeping",
    "build_inbox_defs",
    "build_recipe_defs",
    "build_search_defs",
    "build_window_defs",
]

# The page of a code location names it with its version.
DagsterLibraryRegistry.register("mergepipe-pipeline", __version__, is_dagster_package=False)
