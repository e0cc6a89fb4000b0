"""The hub through its own client: names, revisions, tokens, its cache and offline mode."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from mergepipe_pipeline.errors import CheckpointChangedError, CheckpointError, RemoteError
from mergepipe_pipeline.remote.address import parse_address
from mergepipe_pipeline.remote.hub import gets_token
from mergepipe_pipeline.remote.source import RemoteSource, folder_at
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse
from tests.remote.servers import Fault, FolderServer, HubServer


def test_a_revision_is_pinned_to_its_commit(hub: HubServer, home: Warehouse) -> None:
    commit = hub.commit("org/base")
    for text in ("org/base", "hf://org/base", "hf://org/base@main", f"hf://org/base@{commit}"):
        found = Places(home).locate(text)
        assert (found.root, found.name) == (f"hf://org/base@{commit}", "org-base")
    with pytest.raises(CheckpointError, match="no such revision"):
        Places(home).locate("hf://org/base@v9")


def test_a_new_commit_keeps_the_name_and_equal_files_their_id(
    hub: HubServer, home: Warehouse
) -> None:
    before = Places(home).locate("org/base")
    home.catalog.register(before, None)
    (hub.folder / "org" / "base" / "README.md").write_text("now with a card")
    after = Places(home).locate("org/base")
    assert after.root != before.root
    assert (after.name, after.checkpoint_id) == (before.name, before.checkpoint_id)


def test_a_card_names_the_models_of_the_hub_and_what_their_cards_agree_on(
    hub: HubServer, home: Warehouse, recipe_at: Callable[..., str], tmp_path: Path
) -> None:
    for model in (hub.folder / "org").iterdir():
        (model / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n")
    recipe, out = tmp_path / "r.yml", tmp_path / "out"
    recipe.write_text(recipe_at(lambda name: f"hf://org/{name}"))
    merge(home, recipe, out=out)
    _, front, _ = (out / "README.md").read_text().split("---\n", 2)
    found = yaml.safe_load(front)
    assert found["base_model"] == ["org/base", *(f"org/expert_{i:02d}" for i in range(3))]
    assert (found["license"], found["language"]) == ("mit", ["en"])


def test_headers_alone_are_read_to_know_a_model(hub: HubServer, home: Warehouse) -> None:
    found = Places(home).locate("org/base")
    got = [n for method, path, n in hub.seen.of("/cdn/") if method == "GET"]
    assert sum(got) < 5000 < found.nbytes
    assert len(got) == 2


@pytest.mark.parametrize(
    ("location", "gets"),
    [
        ("https://hub.example/org/m/resolve/c/w", True),
        ("http://hub.example/org/m/resolve/c/w", False),
        ("https://hub.example:444/org/m/resolve/c/w", False),
        ("https://bytes.example/w", False),
    ],
)
def test_the_token_goes_to_the_hubs_own_host_alone_and_never_in_the_open(
    location: str, gets: bool
) -> None:
    assert gets_token(location, "https://hub.example/org/m/resolve/main/w") == gets


def test_a_private_model_needs_the_token_and_the_place_of_bytes_never_gets_it(
    hub: HubServer, home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private.add("org/base")
    with pytest.raises(RemoteError, match=r"hf auth login"):
        Places(home).locate("hf://org/base")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    found = Places(home).locate("hf://org/base")
    # `servers.HubHandler` fails if the token comes there.
    with RemoteSource(found.root) as source:
        assert len(source.read_range("model.safetensors", 100, 100)) == 100


def test_a_token_that_the_hub_does_not_know_is_named_as_what_is_wrong(
    hub: HubServer, home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_last_year")
    with pytest.raises(RemoteError, match=r"401.*Invalid credentials.*HF_TOKEN") as refused:
        Places(home).locate("hf://org/base")
    assert "hf_of_last_year" not in str(refused.value)
    with pytest.raises(CheckpointError, match=r"Invalid credentials.*HF_TOKEN"):
        Places(home).locate("org/base")


def test_a_gated_model_is_told_in_the_hubs_own_words(hub: HubServer, home: Warehouse) -> None:
    hub.gated.add("org/base")
    with pytest.raises(RemoteError, match=r"org/base is restricted\. Visit its page to ask"):
        Places(home).locate("hf://org/base")


@pytest.mark.parametrize("page", [b"<!doctype html>", b"[1, 2]", b'{"siblings": "none"}'])
def test_what_is_no_hub_is_told_by_its_address(
    hub: HubServer,
    folder: FolderServer,
    home: Warehouse,
    monkeypatch: pytest.MonkeyPatch,
    page: bytes,
) -> None:
    folder.page = page
    monkeypatch.setenv("HF_ENDPOINT", folder.url)
    with pytest.raises(RemoteError, match=r"not those of the hub.*HF_ENDPOINT"):
        Places(home).locate("hf://org/base")
    if page.startswith(b"<"):
        with pytest.raises(RemoteError, match=r"not those of the hub.*HF_ENDPOINT"):
            folder_at(parse_address("hf://org/base"))


@pytest.mark.parametrize("size", [None, -5])
def test_a_hub_that_does_not_tell_sizes_is_refused(
    hub: HubServer, home: Warehouse, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    monkeypatch.setattr(hub, "told_nbytes", lambda nbytes: size)
    with pytest.raises(RemoteError, match=r"does not tell the size and digest of config\.json"):
        Places(home).locate("hf://org/base")


def test_a_whole_model_in_the_hubs_cache_is_read_there(
    hub: HubServer, home: Warehouse, tmp_path: Path
) -> None:
    commit = hub.commit("org/base")
    snapshot = tmp_path / "hub_cache" / "models--org--base" / "snapshots" / commit
    shutil.copytree(hub.folder / "org" / "base", snapshot)
    assert Places(home).locate("hf://org/base").root == str(snapshot)
    # A part of it, as other programs leave behind, is not the model.
    (snapshot / "model.safetensors").unlink()
    assert Places(home).locate("hf://org/base").root == f"hf://org/base@{commit}"


def test_offline_the_hub_is_not_asked(
    hub: HubServer, home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RemoteError, match="offline mode"):
        Places(home).locate("hf://org/base")
    with pytest.raises(CheckpointError, match="neither a registered name nor a path"):
        Places(home).locate("org/base")
    assert hub.seen.requests == []


def test_a_name_that_nobody_has_says_what_it_may_be(hub: HubServer, home: Warehouse) -> None:
    with pytest.raises(CheckpointError, match="nor one that the hub gives"):
        Places(home).locate("org/nobody")


def test_a_link_that_has_expired_is_asked_for_anew(hub: HubServer, home: Warehouse) -> None:
    found = Places(home).locate("org/base")
    gets = iter(range(100))
    hub.fault = lambda method, path, number: 403 if "/cdn/" in path and next(gets) == 0 else None
    with RemoteSource(found.root) as source:
        assert len(source.read_range("model.safetensors", 50_000, 100)) == 100
    asked = [path for method, path, _ in hub.seen.of("/resolve/") if method == "HEAD"]
    assert sum(path.endswith("model.safetensors") for path in asked) == 2


def test_bytes_of_another_file_at_the_same_link_are_refused(
    hub: HubServer, home: Warehouse
) -> None:
    found = Places(home).locate("org/base")
    path = hub.folder / "org" / "base" / "model.safetensors"
    path.write_bytes(path.read_bytes()[::-1])
    with (
        RemoteSource(found.root) as source,
        pytest.raises(CheckpointChangedError, match=r"org/base@\w+, model\.safetensors"),
    ):
        source.read_range("model.safetensors", 5000, 100)


def test_a_link_that_expires_under_several_requests_is_asked_for_anew_by_each(
    hub: HubServer, home: Warehouse
) -> None:
    found = Places(home).locate("org/base")
    both, expired = threading.Barrier(2, timeout=10), iter(range(100))

    def fault(method: str, path: str, number: int) -> Fault:
        if "/cdn/" not in path or next(expired) >= 2:
            return None
        both.wait()  # the link ends while both are under way
        return 403

    hub.fault = fault
    with RemoteSource(found.root) as source, ThreadPoolExecutor(2) as pool:
        starts = [50_000, 100_000]
        read = list(pool.map(lambda s: source.read_range("model.safetensors", s, 100), starts))
    content = (hub.folder / "org" / "base" / "model.safetensors").read_bytes()
    assert read == [content[s : s + 100] for s in starts]


def test_what_failed_once_is_asked_for_again_by_the_next_reader(
    hub: HubServer, home: Warehouse
) -> None:
    found = Places(home).locate("org/base")
    hub.fault = lambda method, path, number: 503 if "/cdn/" in path else None
    with RemoteSource(found.root) as source, pytest.raises(RemoteError, match="after 7 attempts"):
        source.read_range("model.safetensors", 50_000, 100)
    hub.fault = lambda method, path, number: None
    with RemoteSource(found.root) as source:
        assert len(source.read_range("model.safetensors", 50_000, 100)) == 100


@pytest.mark.parametrize(("header", "wish"), [("Retry-After", "1"), ("RateLimit", '"api";r=0;t=1')])
@pytest.mark.parametrize("asked", ["/api/", "/resolve/"])
def test_a_busy_hub_is_given_the_time_that_it_asks_for(
    hub: HubServer, home: Warehouse, asked: str, header: str, wish: str
) -> None:
    numbers = iter(range(100))
    hub.asks_by, hub.retry_after = header, wish
    hub.fault = lambda method, path, number: 429 if asked in path and next(numbers) == 0 else None
    started = time.monotonic()
    Places(home).locate("org/base")
    assert time.monotonic() - started >= 1


@pytest.mark.parametrize("name", ["org/model.git", "org/a..b", "a--b/model"])
def test_a_name_that_the_hub_never_gives_is_told_as_such(home: Warehouse, name: str) -> None:
    with pytest.raises(RemoteError, match="An address cannot be read") as error:
        Places(home).locate(f"hf://{name}")
    assert "HF_ENDPOINT" not in str(error.value)
