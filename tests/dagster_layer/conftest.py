"""A warehouse under Dagster: folders land, the ticker runs what sensors request."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.warehouse import Warehouse

Drop = Callable[..., None]


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """A Dagster instance that is gone after the test."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def ticker(home: Warehouse, instance: dg.DagsterInstance) -> Ticker:
    """The sensors of the warehouse."""
    return Ticker(home, instance)


@pytest.fixture
def drop(home: Warehouse, family: Path) -> Drop:
    """Copies a checkpoint of the family (or a folder) into the inbox."""

    def copy(name: str, source: str | Path | None = None) -> None:
        shutil.copytree(family / (source or name), home.inbox / name, dirs_exist_ok=True)

    return copy


@pytest.fixture
def recipe_file(home: Warehouse, drop: Drop) -> RecipeFile:
    """Recipe n of a base and an expert of two shards, both indexed, without any run."""
    model = "- {model: expert_01, parameters: {weight: 0.5}}"
    text = f"merge_method: task_arithmetic\nbase_model: base\nmodels:\n{model}\n"
    home.recipe_path("n").write_text(text)
    for name in ("base", "expert_01"):
        drop(name)
        index_arrival(home, name)
    (recipe_file,) = recipe_files(home)
    return recipe_file
