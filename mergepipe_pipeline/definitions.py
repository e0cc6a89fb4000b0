"""Which definitions exist: the one place, built from the recipes of the warehouse.

Loaded by `workspace.yaml`. Loading reads recipe files and the catalog, never a weight, and does not
import torch.
"""

from dataclasses import replace

import dagster as dg

from mergepipe_pipeline.assets.metadata import description
from mergepipe_pipeline.assets.place import ALONE, IsKnown
from mergepipe_pipeline.assets.status import build_status
from mergepipe_pipeline.dagster.parts import (
    of_housekeeping,
    of_inbox,
    of_recipes,
    of_searches,
    resources,
)
from mergepipe_pipeline.deploy.instance import identity_of
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.deploy.standing import how_to_begin
from mergepipe_pipeline.resources import Engine, MergePipe, build_executor
from mergepipe_pipeline.sensors.reload import (
    build_reload_sensor,
    definitions_token,
    files_token,
    spreading,
)
from mergepipe_pipeline.settings import SHARDS
from mergepipe_pipeline.verbs.search import standing_searches
from mergepipe_pipeline.warehouse import Warehouse


def build_definitions(
    home: Warehouse,
    mergepipe: MergePipe | None = None,
    is_known: IsKnown = lambda context: True,
    shards: int | None = None,
) -> dg.Definitions:
    """The definitions of one warehouse, with its resource (by default as the environment says).

    `is_known`: whether the daemon has heard of them, as far as one has to.
    `shards`: the steps that a merge is split into, by default as the environment says.

    A recipe that cannot be used is one asset that says why, and has no job.
    """
    files, place = recipe_files(home), replace(ALONE, is_known=is_known)
    searches = standing_searches(home, files)
    token = files_token(identity_of(home), (*files, *searches))
    land, write = (description(text) for text in how_to_begin(home))
    begin = f"To begin, {land}; then {write}."
    shared = dg.Definitions(
        assets=[build_status(begin)],
        sensors=[build_reload_sensor(lambda now: definitions_token(now) != token)],
        resources=resources(mergepipe or MergePipe(home=str(home.root)), Engine(), place),
        executor=build_executor(home),
    )
    return dg.Definitions.merge(
        shared,
        of_inbox(home, place, begin),
        of_housekeeping(place),
        of_recipes(files, shards or SHARDS.value(), place),
        of_searches(searches, identity_of(home), place),
    )


defs = build_definitions(Warehouse.at(), is_known=spreading())
