"""A warehouse under Dagster: folders land, the ticker runs what sensors request."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mergepipe_pipeline.assets.experts import experts_of
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.warehouse import Warehouse

Drop = Callable[..., None]


def records_of(table: object) -> list[Mapping[str, object]]:
    """The rows of a table that the UI shows, by column."""
    assert isinstance(table, dg.TableMetadataValue), table
    return [record.data for record in table.records]


def plain(metadata: Mapping[str, dg.MetadataValue[Any]]) -> dict[str, object]:
    """Values as they were given; tables stay tables."""
    tables = {k: v for k, v in metadata.items() if isinstance(v, dg.TableMetadataValue)}
    return {k: tables.get(k, v.value) for k, v in metadata.items()}


def shown(instance: dg.DagsterInstance, *key: str) -> dict[str, object]:
    """What the UI shows of the last materialisation of an asset."""
    event = instance.get_latest_materialization_event(dg.AssetKey(key))
    assert event is not None
    assert event.asset_materialization is not None
    return plain(event.asset_materialization.metadata)


def known_experts(instance: dg.DagsterInstance, home: Warehouse) -> list[str]:
    """The experts of a warehouse that are partitions in Dagster."""
    return list(instance.get_dynamic_partitions(experts_of(home).name or ""))


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
