"""The models that pages and examples speak of, in a working directory of the test's own."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.docs.page import DOCS


@pytest.fixture(scope="session")
def example_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `docs/examples/make_models.py` writes; read-only."""
    folder = tmp_path_factory.mktemp("examples") / "models"
    runpy.run_path(str(DOCS / "examples" / "make_models.py"))["main"](folder)
    return folder


@pytest.fixture
def models(example_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `models/` in it."""
    (tmp_path / "models").symlink_to(example_models)
    monkeypatch.delenv("MERGEPIPE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path
