"""A world to search, beside the test's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.search.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
