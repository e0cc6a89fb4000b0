"""What all assets carry for people: owners, kinds, tags and the group they are shown in."""

from typing import TypedDict

from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.settings import OWNERS
from mergepipe_pipeline.verbs.standing_searches import StandingSearch


def owners() -> list[str]:
    """Who is asked about the assets."""
    return list(OWNERS.value())


class Labels(TypedDict):
    """Keywords of `dg.asset` and `dg.AssetSpec`."""

    group_name: str
    tags: dict[str, str]
    owners: list[str]
    kinds: set[str]


def labels(file: RecipeFile | StandingSearch, *kinds: str) -> Labels:
    """What an asset of a recipe or search carries; `kinds` are at most three.

    The tag `expert/<name>` finds every asset that depends on an expert.
    """
    # Dagster's tags take 63 characters; names may be longer.
    experts = {f"expert/{member[:63]}": "" for member in file.members}
    return {
        "group_name": file.identifier,
        "tags": {"recipe" if isinstance(file, RecipeFile) else "search": file.name, **experts},
        "owners": owners(),
        "kinds": set(kinds),
    }
