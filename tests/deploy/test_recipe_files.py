"""What the recipe files of a warehouse ask for together."""

from __future__ import annotations

from pathlib import Path

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse

RECIPE = "merge_method: linear\nmodels: [{model: expert_00, parameters: {weight: 1.0}}]\n"


def test_of_recipes_that_would_publish_to_one_ref_only_its_own_is_usable(
    home: Warehouse, family: Path
) -> None:
    register(home, family / "expert_00", "expert_00")
    for name, ref in (("a", "ref: mix\n"), ("b", "ref: live\n"), ("c", "ref: live\n"), ("mix", "")):
        home.recipe_path(name).write_text(ref + RECIPE)
    problems = {file.name: file.problem for file in recipe_files(home)}
    assert problems["mix"] is None
    assert problems["b"] is None
    assert "ref mix of the recipe mix: give it another `ref:`" in str(problems["a"])
    assert "ref live of the recipe b" in str(problems["c"])
    home.recipe_path("b").unlink()
    assert [c.name for c in recipe_files(home) if c.problem] == ["a"]
