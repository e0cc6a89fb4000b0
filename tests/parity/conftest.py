"""Fixtures of the parity tests: families are made once per module, mergekit's absence skips."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.architectures import make

#: Makes (or finds) the family of an architecture: `family_of(arch, stored, unchanged)`.
FamilyOf = Callable[..., Path]


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> FamilyOf:
    """Families of a base and three experts; read-only."""
    made: dict[tuple[str, str, bool], Path] = {}

    def family(arch: str, stored: str = "bfloat16", unchanged: bool = True) -> Path:
        key = (arch, stored, unchanged)
        if key not in made:
            folder = tmp_path_factory.mktemp(arch)
            made[key] = make(arch, folder, 3, dtype=getattr(torch, stored), unchanged=unchanged)
        return made[key]

    return family


@pytest.fixture(scope="session")
def mergekit_is_here() -> None:
    """Skips where the peer is not installed."""
    if importlib.util.find_spec("mergekit") is None:
        pytest.skip("mergekit is not installed (.[peer])")
