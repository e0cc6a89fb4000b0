"""The public door for projects of others: resource, builders, components, translator."""

from mergepipe_pipeline.assets.place import MergePipeProps, MergePipeTranslator
from mergepipe_pipeline.dagster.components import (
    InboxComponent,
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
from mergepipe_pipeline.dagster.resource import MergePipeResource

__all__ = [
    "InboxComponent",
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
