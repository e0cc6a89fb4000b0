"""Standing recipes over models at addresses: by the names that they are registered under."""

from __future__ import annotations

import pytest

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.errors import InputChangedError
from mergepipe_pipeline.remote.servers import PINS
from mergepipe_pipeline.verbs.deploy import plan_recipe
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.remote.servers import FolderServer, HubServer

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
    with pytest.raises(InputChangedError, match="math is not what was registered") as changed:
        plan_recipe(home, file)
    assert "`mergepipe register ADDRESS --name math` and `mergepipe analyze math`" in str(
        changed.value
    )
    register(home, address, "math")
    assert plan_recipe(home, file).sources[0].root == address


def test_an_address_that_does_not_answer_says_so_and_not_that_sensors_index_it(
    hub: HubServer, home: Warehouse
) -> None:
    register(home, "hf://org/expert_00", "math")
    home.recipe_path("r").write_text(RECIPE.replace("MODEL", "math"))
    (file,) = recipe_files(home)
    hub.fault = lambda *_: 401
    PINS.forget(home.catalog.root("math"))
    with pytest.raises(InputChangedError, match="math cannot be had as it was registered") as lost:
        plan_recipe(home, file)
    assert "sensors index" not in str(lost.value)
