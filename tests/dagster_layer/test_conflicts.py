"""The conflicts asset: tables and a picture that the UI can show."""

from __future__ import annotations

import re
from base64 import b64decode

import dagster as dg
import pytest

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, plain, records_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@pytest.fixture
def metadata(home: Warehouse, drop: Drop) -> dict[str, object]:
    """What the asset of a recipe of three experts reports."""
    names = ["expert_00", "expert_01", "expert_02"]
    for name in ("base", *names):
        drop(name)
        register(home, str(home.inbox / name), name, None if name == "base" else "base")
    home.recipe_path("a").write_text(
        "merge_method: task_arithmetic\nbase_model: base\nparameters: {weight: 0.5}\nmodels:\n"
        + "".join(f"  - model: {name}\n" for name in names)
    )
    key = dg.AssetKey(["a", "conflicts"])
    graph = build_definitions(home)
    assets = [a for a in graph.assets or () if isinstance(a, dg.AssetsDefinition)]
    (asset,) = [a for a in assets if a.keys == {key}]
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([asset], instance=instance, resources=graph.resources)
        (made,) = result.asset_materializations_for_node("a__conflicts")
    return plain(made.metadata)


def test_the_metadata_has_figures_with_errors_and_tables(metadata: dict[str, object]) -> None:
    assert metadata["experts"] == 3
    for figure in ("standard error of the interference", "largest standard error of a cosine"):
        assert isinstance(error := metadata[figure], float)
        assert 0 < error < 0.2
    assert len(records_of(metadata["cosines"])) == 3
    layers = [row["layer"] for row in records_of(metadata["by layer"])]
    assert layers == ["embed", "layer.00", "layer.01", "head"]


def test_the_heat_map_is_a_small_png_inside_markdown(metadata: dict[str, object]) -> None:
    shown = str(metadata["heat map of cosines"])
    match = re.fullmatch(r"!\[.+\]\(data:image/png;base64,([\w+/=]+)\)", shown)
    assert match
    assert b64decode(match[1]).startswith(b"\x89PNG\r\n\x1a\n")
    assert len(match[0]) < 200_000
