"""With many experts in a warehouse, a recipe costs what its own cost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.deploy.recorded import reason_to_wait_for
from mergepipe_pipeline.deploy.standing import wanted
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse

RECIPE = "merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: expert_00}]\n"


def test_what_a_recipe_looks_at_does_not_grow_with_the_experts_that_it_does_not_use(
    home: Warehouse, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("base", "expert_00"):
        shutil.copytree(family / name, home.inbox / name)
        index_arrival(home, name)
    home.recipe_path("r").write_text(RECIPE)
    listed: list[Path] = []
    plain = Path.iterdir

    def counted(folder: Path) -> Iterator[Path]:
        listed.append(folder)
        return plain(folder)

    def look() -> list[Path]:
        """The folders that are listed to say what is wanted of the recipe."""
        listed.clear()
        (file,) = recipe_files(home)
        assert wanted(home, file) is not None
        assert reason_to_wait_for(home, file.members) is None
        return list(listed)

    monkeypatch.setattr(Path, "iterdir", counted)
    few = look()
    for i in range(5):
        register(home, family / "expert_01", f"other_{i}")
    assert look() == few


@pytest.mark.parametrize("name", ["base", "other", "", ".", "..", "base/..", "../names/base", "é"])
def test_a_catalog_holds_the_names_that_it_lists(home: Warehouse, family: Path, name: str) -> None:
    register(home, family / "base", "base")
    (home.catalog_dir / "names" / "other").mkdir()
    catalog = home.catalog
    assert (name in catalog) == (name in catalog.names())
