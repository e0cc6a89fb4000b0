"""Servers that lie about bytes, numbers and places: refused with the cause; nothing is kept."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import CorruptionError, MergePipeError, RemoteError
from mergepipe_pipeline.remote import fetch, redirects
from mergepipe_pipeline.remote.redirects import permitted
from mergepipe_pipeline.remote.source import RemoteSource
from mergepipe_pipeline.remote.web import asked_s
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.land import land
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.remote.servers import FolderServer, HubServer, blob_id, running

WEIGHTS = "model.safetensors"


@pytest.fixture
def mirror(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Another server of the same models, which is asked in place of the hub."""
    with running(HubServer(hub.folder)) as server:
        assert isinstance(server, HubServer)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.mark.parametrize("file", [WEIGHTS, "config.json"])
def test_a_mirror_that_lies_is_refused_and_the_honest_hub_is_not_believed_to_have_sent_it(
    hub: HubServer,
    mirror: HubServer,
    home: Warehouse,
    fresh_downloads: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
) -> None:
    mirror.fault = lambda method, path, number: "lie" if file in path else None
    with pytest.raises(CorruptionError, match="sends another file than it states") as refused:
        land(home, "hf://org/expert_00", "x")
    path = hub.folder / "org" / "expert_00" / file
    expected, found = str(refused.value.expected), str(refused.value.found)
    assert expected.startswith("sha256 " if file == WEIGHTS else f"git blob {blob_id(path)}")
    assert len(expected) == len(found)
    assert expected != found
    assert list(home.inbox.iterdir()) == []
    assert not any(p.stat().st_size == path.stat().st_size for p in fresh_downloads.rglob("*-*"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    land(home, "hf://org/expert_00", "x")
    assert (home.inbox / "x" / file).read_bytes() == path.read_bytes()


def test_what_a_lying_mirror_gave_before_it_was_found_out_is_of_no_use_for_the_hub(
    hub: HubServer, mirror: HubServer, home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.fault = lambda method, path, number: "lie" if WEIGHTS in path else None
    for name in ("base", "expert_00"):
        register(home, f"hf://org/{name}", name)
    with pytest.raises(CorruptionError, match="sends another file than it states"):
        analyze(home, ["expert_00"], base="base")
    told = home.catalog.get("expert_00").checkpoint.checkpoint_id
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert Places(home).locate("hf://org/expert_00").checkpoint_id != told
    for name in ("base", "expert_00"):
        register(home, f"hf://org/{name}", name)
    analyze(home, ["expert_00"], base="base")


def test_a_name_that_leads_out_of_the_address_is_refused(hub: HubServer, home: Warehouse) -> None:
    (hub.folder / "org" / "base" / "a\nb").write_text("{}")
    with pytest.raises(RemoteError, match="lies in no folder of the address"):
        land(home, "hf://org/base", "x")


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[FolderServer]:
    """An internal service: it has a text where a model has its template."""
    folder = tmp_path / "inside"
    folder.mkdir()
    for name in ("chat_template.jinja", WEIGHTS):
        (folder / name).write_text("the password is pa55word")
    with running(FolderServer(folder)) as server:
        assert isinstance(server, FolderServer)
        yield server


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_redirect_of_a_side_file_to_another_server_is_refused_before_that_is_asked(
    folder: FolderServer, inside: FolderServer, home: Warehouse, method: str
) -> None:
    shutil.copy(inside.folder / "chat_template.jinja", folder.folder / "expert_00")
    target = f"{inside.url}/chat_template.jinja"
    folder.fault = lambda asked, path, number: (
        target if asked == method and path.endswith(".jinja") else None
    )
    with pytest.raises(RemoteError, match=r"must not go.*same scheme, host and port"):
        land(home, f"{folder.url}/expert_00", "x")
    assert inside.seen.requests == []
    assert list(home.inbox.iterdir()) == []


def test_a_redirect_within_the_server_and_of_weights_to_another_is_followed(
    folder: FolderServer, home: Warehouse
) -> None:
    with running(FolderServer(folder.folder)) as other:
        folder.fault = lambda method, path, number: (
            f"{other.url}/expert_00/{WEIGHTS}"
            if path == f"/moved/{WEIGHTS}"
            else f"{folder.url}{path.replace('moved', 'expert_00')}"
            if path.startswith("/moved/")
            else None
        )
        land(home, f"{folder.url}/moved", "x")
    for path in (folder.folder / "expert_00").iterdir():
        assert (home.inbox / "x" / path.name).read_bytes() == path.read_bytes()


def test_a_server_that_redirects_for_ever_is_given_up(folder: FolderServer) -> None:
    folder.fault = lambda method, path, number: f"{folder.url}{path}"
    with pytest.raises(RemoteError, match="more than 5 redirects"):
        RemoteSource(f"{folder.url}/expert_00")
    assert len(folder.seen.requests) == 5


_NAMES = {
    "hub.example": ["203.1.113.5"],
    "cdn.example": ["198.41.0.4", "2001:500:200::b"],
    "half.example": ["198.41.0.4", "10.0.0.8"],
    "intranet.example": ["10.0.0.7"],
    "metadata.example": ["169.254.169.254"],
}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Names that nobody asks a server for; numbers are as they are."""
    known = socket.getaddrinfo

    def found(host: str, *given: object, **named: object) -> object:
        if host not in _NAMES:
            return known(host, *given, **named)  # type: ignore[arg-type]
        return [(0, 0, 0, "", (address, 0)) for address in _NAMES[host]]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    redirects._reaches.cache_clear()
    yield
    redirects._reaches.cache_clear()


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("given", "location", "goes"),
    [
        ("https://hub.example/m", "/api/m", True),
        ("https://hub.example/m", "https://cdn.example/w?signature=1", True),
        ("https://hub.example/m", "http://hub.example/m", False),
        ("https://hub.example/m", "http://cdn.example/m", False),
        ("https://hub.example/m", "https://half.example/m", False),
        ("https://hub.example/m", "https://127.0.0.1/m", False),
        ("https://hub.example/m", "https://[::1]/m", False),
        ("https://hub.example/m", "https://[::ffff:10.0.0.1]/m", False),
        ("https://hub.example/m", "https://[64:ff9b::a9fe:a9fe]/m", False),
        ("https://hub.example/m", "https://[fd12::1]/m", False),
        ("https://hub.example/m", "https://0.0.0.0/m", False),
        ("https://hub.example/m", "https://2130706433/m", False),
        ("https://hub.example/m", "https://100.64.0.1/m", False),
        ("https://hub.example/m", "https://metadata.example/m", False),
        ("https://hub.example/m", "https://168.63.129.16/m", False),
        ("https://hub.example/m", "file:///etc/passwd", False),
        ("https://hub.example/m", "https://cdn.example:port/w", False),
        ("http://intranet.example/m", "http://10.1.0.1/m", True),
        ("http://intranet.example/m", "http://127.0.0.1/m", False),
        ("http://intranet.example/m", "http://169.254.169.254/m", False),
        ("http://127.0.0.1:8000/m", "http://localhost:9000/m", True),
        ("http://127.0.0.1:8000/m", "http://metadata.example/m", False),
    ],
)
def test_a_redirect_leads_to_public_places_or_where_the_given_address_is(
    given: str, location: str, goes: bool
) -> None:
    if goes:
        assert permitted(given, given, location).startswith("http")
        return
    with pytest.raises(RemoteError, match="must not go") as refused:
        permitted(given, given, location)
    assert "signature" not in str(refused.value)


def test_the_hubs_own_client_keeps_to_the_rule(
    hub: HubServer, home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fault = lambda method, path, number: "http://169.254.169.254/latest/meta-data"
    with pytest.raises(RemoteError, match=r"must not go.*which is link-local"):
        Places(home).locate("hf://org/base")
    hub.fault = lambda method, path, number: (
        "http://169.254.169.254/x" if method == "HEAD" and path.endswith(WEIGHTS) else None
    )
    with pytest.raises(RemoteError, match=r"must not go.*which is link-local"):
        Places(home).locate("hf://org/base")


@pytest.mark.parametrize("fault", ["digits", "total", "tag"])
@pytest.mark.parametrize("kind", ["web", "hub"])
def test_numbers_and_tags_of_servers_that_are_wrong_are_refused_by_name(
    folder: FolderServer, hub: HubServer, home: Warehouse, fault: str, kind: str
) -> None:
    for server in (folder, hub):
        server.fault = lambda method, path, number: (
            fault if method == "GET" and path.partition("?")[0].endswith(".safetensors") else None
        )
    # The tag of the hub's place for bytes is whatever it is at first.
    if (fault, kind) == ("tag", "hub"):
        return
    with pytest.raises(MergePipeError, match=r"model\.safetensors"):
        land(home, f"{folder.url}/base" if kind == "web" else "hf://org/base", "x")
    assert list(home.inbox.iterdir()) == []


@pytest.mark.parametrize(
    ("wish", "seconds"),
    [("5", 5.0), ("²", None), ("٣", None), ("-1", None), ("9" * 5000, 9999999999.0), ("", None)],
)
def test_a_wish_to_wait_is_a_number_a_date_or_nothing(wish: str, seconds: float | None) -> None:
    assert asked_s({"retry-after": wish}) == seconds
    assert asked_s({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert asked_s({"retry-after": "Wed, 99 Oct 99999999999999 07:28:00 GMT"}) is None


def test_a_server_that_gives_a_byte_a_request_is_given_up(
    folder: FolderServer,
) -> None:
    folder.fault = lambda method, path, number: (
        "byte" if method == "GET" and path.endswith(WEIGHTS) else None
    )
    with (
        RemoteSource(f"{folder.url}/base") as source,
        pytest.raises(RemoteError, match=r"received 1 bytes.*after 7 attempts"),
    ):
        source.read_range(WEIGHTS, 0, 1000)


def test_a_server_that_drips_is_given_up(
    folder: FolderServer, hub: HubServer, home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "PATIENCE_S", 0.3)
    folder.drip_s = hub.drip_s = 0.05
    began = time.monotonic()
    with (
        RemoteSource(f"{folder.url}/base") as source,
        pytest.raises(RemoteError, match=r"it sent \d+ bytes in 0 s"),
    ):
        source.read_range(WEIGHTS, 0, 1000)
    with pytest.raises(RemoteError, match=r"it sent \d+ bytes in 0 s"):
        Places(home).locate("hf://org/base")
    assert time.monotonic() - began < 10
