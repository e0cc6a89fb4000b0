"""Servers that all tests here share, and an empty folder of downloads for each test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mergepipe_pipeline.remote import clients, fetch
from mergepipe_pipeline.remote.servers import PINS
from tests.remote import servers


@pytest.fixture(autouse=True)
def fresh_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No test finds what another downloaded or listed; retries wait for milliseconds."""
    from huggingface_hub import close_session

    monkeypatch.setenv("MERGEPIPE_DOWNLOADS", str(tmp_path / "downloads"))
    monkeypatch.setattr(fetch, "PAUSE_S", 0.002)
    monkeypatch.setattr(PINS, "_known", {})
    yield tmp_path / "downloads"
    close_session()
    if clients._web_client.cache_info().currsize:
        clients._web_client().close()
    clients._web_client.cache_clear()
    clients.bucket_store.cache_clear()


@pytest.fixture
def folder(family: Path, tmp_path: Path) -> Iterator[servers.FolderServer]:
    """A web server of a copy of the family."""
    shutil.copytree(family, tmp_path / "web")
    with servers.running(servers.FolderServer(tmp_path / "web")) as server:
        assert isinstance(server, servers.FolderServer)
        yield server


@pytest.fixture
def hub(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[servers.HubServer]:
    """A hub with the family as `org/base`, `org/expert_00` and so on."""
    from huggingface_hub import constants

    shutil.copytree(family, tmp_path / "hub" / "org")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub_cache"))
    with servers.running(servers.HubServer(tmp_path / "hub")) as server:
        assert isinstance(server, servers.HubServer)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture(scope="session")
def s3_upstream(family: Path) -> Iterator[str]:
    """An S3 server with the family below `s3://models/family`."""
    with servers.s3_server() as endpoint:
        for model in sorted(family.iterdir()):
            servers.s3_upload(endpoint, "models", f"family/{model.name}", model)
        yield endpoint


@pytest.fixture
def s3(s3_upstream: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[servers.ProxyServer]:
    """The S3 server behind one that counts and breaks."""
    with servers.running(servers.ProxyServer(s3_upstream)) as server:
        assert isinstance(server, servers.ProxyServer)
        for name, value in servers.s3_environment(server.url).items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def recipe_at() -> Callable[..., str]:
    """Builds a recipe over the family at places that a function gives for names."""

    def build(place: Callable[[str], str], budget: str = "30%") -> str:
        lines = ["merge_method: ties", f"base_model: {place('base')}", "models:"]
        for i in range(3):
            lines += [f"  - model: {place(f'expert_{i:02d}')}", "    parameters: {weight: 0.5}"]
        return "\n".join([*lines, "parameters: {density: 0.3}", f"budget: {budget}", ""])

    return build
