"""What a look at one recipe costs does not grow with what else a warehouse holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.execution.lookup import snapshot_of
from mergepipe_pipeline.verbs import deploy
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.warehouse import Warehouse
from tests.listed import folders_listed

NAMES = ("base", "expert_00", "expert_01")
RECIPE = (
    "merge_method: task_arithmetic\nbase_model: base\n"
    "models: [{model: MODEL, parameters: {weight: 0.5}}]\n"
)


@pytest.fixture
def standing(home: Warehouse, family: Path) -> Warehouse:
    """A warehouse with a recipe `n` of an indexed family."""
    for name in NAMES:
        shutil.copytree(family / name, home.inbox / name)
        index_arrival(home, name)
    home.recipe_path("n").write_text(RECIPE.replace("MODEL", "expert_00"))
    return home


@pytest.fixture
def released(standing: Warehouse) -> RecipeFile:
    """The recipe, released."""
    (file,) = recipe_files(standing)
    deploy.plan_recipe(standing, file)
    list(deploy.merge_recipe(standing, file.name, file.layers, deploy.EngineOptions()))
    deploy.snapshot_recipe(standing, file.name)
    deploy.release_recipe(standing, file)
    return file


def test_a_recipe_and_a_ref_are_looked_up_without_a_look_at_any_other_ref(
    standing: Warehouse, released: RecipeFile
) -> None:
    snapshot_id = standing.refs.current("n").snapshot_id
    for ref in ("a", "z"):
        standing.refs.publish(ref, snapshot_id, "by hand")
    with folders_listed() as listed:
        assert deploy.due(standing, released) == deploy.CURRENT
        assert snapshot_of(standing, "n") == snapshot_id
        assert snapshot_of(standing, "n@1") == snapshot_id
    assert {folder for folder in listed if folder.is_relative_to(standing.refs_dir)} == {
        standing.refs_dir / "n"
    }
