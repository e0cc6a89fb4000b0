"""Standing recipes over models at addresses: by the names that they are registered under."""

from __future__ import annotations

import pytest

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.errors import InputChangedError
from mergepipe_pipeline.remote.sites import PINS
from mergepipe_pipeline.verbs.deploy import plan_recipe
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.remote.servers import FolderServer

RECIPE = """merge_method: linear
models:
  - {model: MODEL, parameters: {weight: 0.5}}
"""


def test_a_standing_recipe_takes_models_that_were_registered_at_addresses(
    folder: FolderServer, home: Warehouse
) -> None:
    path, address = home.recipe_path("r"), f"{folder.url}/expert_00"
    path.write_text(RECIPE.replace("MODEL", address))
    (file,) = recipe_files(home)
    assert f"mergepipe register {address} --name NAME" in (file.problem or "")

    register(home, address, "math")
    path.write_text(RECIPE.replace("MODEL", "math"))
    (file,) = recipe_files(home)
    assert file.problem is None
    assert [s.root for s in plan_recipe(home, file).sources] == [address]

    weights = folder.folder / "expert_00" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2] + b"\x00\x00")
    PINS.forget(address)  # as whoever reads it does, and as a process that begins
    with pytest.raises(InputChangedError, match="math waits for its index"):
        plan_recipe(home, file)
