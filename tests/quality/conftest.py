"""One warehouse for all that trace, since making it takes longer than most of them."""

from __future__ import annotations

import pytest

from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.warehouse import Warehouse
from tests.quality.world import World


@pytest.fixture(scope="session")
def used_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world as the last test left it."""
    return World(Warehouse.at(tmp_path_factory.mktemp("world") / "warehouse").ensure())


@pytest.fixture
def world(used_world: World) -> World:
    """A released recipe whose merge is 1 everywhere; nothing is left of what others tried."""
    used_world.clear()
    used_world.write()
    assert used_world.becomes() is None
    collect(used_world.home, older_than_s=0)
    return used_world
