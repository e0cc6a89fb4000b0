"""Servers that tests of writing share: of S3 with a bucket for each test, and of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.remote.writing.hub_writes import Hub, hub_for_writing
from tests.remote.writing.watched_s3 import WatchedS3, watched_s3


@pytest.fixture(scope="session")
def running() -> Iterator[WatchedS3]:
    with watched_s3() as server:
        yield server


@pytest.fixture
def s3(running: WatchedS3, monkeypatch: pytest.MonkeyPatch) -> WatchedS3:
    """The server, in the environment."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.clear()
    return running


@pytest.fixture
def bucket(s3: WatchedS3, request: pytest.FixtureRequest) -> str:
    """The name of an empty bucket of the test's own."""
    name = f"test-{abs(hash(request.node.name))}"
    s3.make(name)
    s3.clear()
    return name


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty hub, which the client in this process finds; it has read its variables before."""
    with hub_for_writing() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        url = found.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield found
