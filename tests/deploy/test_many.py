"""What a look at one recipe costs does not grow with what else a warehouse holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mergepipe_pipeline.catalog import arrow_tables
from mergepipe_pipeline.deploy import recipe_files as reading
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.execution.lookup import snapshot_of
from mergepipe_pipeline.resolution import recipe_text
from mergepipe_pipeline.verbs import deploy
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.listed import folders_listed

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
    list(deploy.merge_recipe(standing, file.name, file.layers, EngineOptions()))
    deploy.snapshot_recipe(standing, file.name)
    deploy.release_recipe(standing, file)
    return file


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Callable[[], int]:
    """How often a module has called a function since the last time this was asked."""
    calls, real = list[None](), getattr(module, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return real(*args, **kwargs)

    def number() -> int:
        found = len(calls)
        calls.clear()
        return found

    monkeypatch.setattr(module, name, called)
    return number


def test_a_recipe_is_parsed_and_resolved_once_and_again_when_it_or_an_input_changed(
    standing: Warehouse, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = counted(monkeypatch, recipe_text, "parse_recipes")
    resolved = counted(monkeypatch, reading, "open_stage")

    def looked_at() -> tuple[int, int]:
        assert [file.problem for file in recipe_files(standing)] == [None]
        return parsed(), resolved()

    assert looked_at() == (1, 1)
    assert looked_at() == (0, 0)
    standing.recipe_path("n").write_text(RECIPE.replace("MODEL", "expert_01"))
    assert looked_at() == (1, 1)
    shutil.rmtree(standing.inbox / "expert_01")
    shutil.copytree(family / "expert_02", standing.inbox / "expert_01")
    register(standing, standing.inbox / "expert_01", "expert_01")
    assert looked_at() == (0, 1)
    assert looked_at() == (0, 0)


def test_what_selectors_take_and_pinned_revisions_are_looked_up_each_time(
    standing: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = counted(monkeypatch, reading, "open_stage")
    standing.recipe_path("n").write_text(RECIPE.replace("model: MODEL", "match: expert_*"))
    (file,) = recipe_files(standing)
    assert file.members == NAMES
    standing.catalog.put_tags("expert_01", ["old"], [])
    text = RECIPE.replace("model: MODEL", "tag: old")
    standing.recipe_path("n").write_text(text)
    assert recipe_files(standing)[0].members == ("base", "expert_01")
    standing.catalog.put_tags("expert_00", ["old"], [])
    assert recipe_files(standing)[0].members == NAMES
    standing.recipe_path("n").write_text(RECIPE.replace("MODEL", "expert_00@1"))
    for _ in range(2):
        resolved()
        assert [file.problem for file in recipe_files(standing)] == [None]
        assert resolved() == 1


def test_the_record_of_an_input_is_decoded_once_until_there_is_another(
    standing: Warehouse, released: RecipeFile, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = counted(monkeypatch, arrow_tables, "decode_checkpoint")
    assert deploy.due(standing, released) == deploy.current(released)
    decoded()
    assert deploy.due(standing, released) == deploy.current(released)
    assert decoded() == 0
    shutil.rmtree(standing.inbox / "expert_00")
    shutil.copytree(family / "expert_02", standing.inbox / "expert_00")
    index_arrival(standing, "expert_00")
    assert isinstance(deploy.due(standing, released), deploy.Due)


def test_an_expert_is_indexed_without_a_recipe_being_resolved(
    standing: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = counted(monkeypatch, reading, "open_stage")
    assert index_arrival(standing, "expert_00").bases == ("base",)
    assert resolved() == 0


def test_a_recipe_and_a_ref_are_looked_up_without_a_look_at_any_other_ref(
    standing: Warehouse, released: RecipeFile
) -> None:
    snapshot_id = standing.refs.current("n").snapshot_id
    for ref in ("a", "z"):
        standing.refs.publish(ref, snapshot_id, "by hand")
    with folders_listed() as listed:
        assert deploy.due(standing, released) == deploy.current(released)
        assert snapshot_of(standing, "n") == snapshot_id
        assert snapshot_of(standing, "n@1") == snapshot_id
    assert {folder for folder in listed if folder.is_relative_to(standing.refs_dir)} == {
        standing.refs_dir / "n"
    }
