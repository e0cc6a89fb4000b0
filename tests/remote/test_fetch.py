"""Reads from servers that behave badly: the bytes are right, or the error says what failed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.errors import CheckpointChangedError, CheckpointError, RemoteError
from mergepipe_pipeline.remote import clients, fetch
from mergepipe_pipeline.remote.source import RemoteSource
from tests.remote.servers import Fault, FolderServer, ProxyServer

WEIGHTS = "model.safetensors"


def _only(what: Fault, *, every: int = 1) -> Callable[[str, str, int], Fault]:
    """The fault in each `every`th answer with a part of the weights."""
    count = iter(range(1, 10_000))

    def fault(method: str, path: str, number: int) -> Fault:
        is_part = method == "GET" and path.endswith(WEIGHTS)
        return what if is_part and next(count) % every == 0 else None

    return fault


def _whole(server: FolderServer) -> tuple[bytes, bytes]:
    """The weights of an expert as they are, and as a source reads them in two parts."""
    expected = (server.folder / "expert_00" / WEIGHTS).read_bytes()
    with RemoteSource(f"{server.url}/expert_00") as source:
        half = len(expected) // 2
        found = source.read_range(WEIGHTS, 0, half)
        return expected, found + source.read_range(WEIGHTS, half, len(expected) - half)


def test_an_answer_that_is_cut_is_continued_at_the_byte_reached(folder: FolderServer) -> None:
    folder.fault = _only("cut", every=2)
    expected, found = _whole(folder)
    assert found == expected
    assert folder.seen.of(WEIGHTS)[0][0] == "HEAD"
    assert sum(n for _, p, n in folder.seen.requests if p.endswith(WEIGHTS)) == len(expected)


def test_a_server_that_stalls_is_asked_again(
    folder: FolderServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergepipe_pipeline.remote.web.TIMEOUT_S", 0.2)
    folder.stall_s = 0.6
    folder.fault = _only("stall", every=2)
    expected, found = _whole(folder)
    assert found == expected


def test_a_busy_server_is_given_the_time_that_it_asks_for(folder: FolderServer) -> None:
    folder.retry_after = "1"
    folder.fault = _only(429, every=2)
    began = time.monotonic()
    expected, found = _whole(folder)
    assert found == expected
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize(("status", "attempts"), [(503, "7 attempts"), (403, "1 attempt")])
def test_what_is_never_given_is_said_with_file_range_status_and_attempts(
    folder: FolderServer, status: int, attempts: str
) -> None:
    folder.fault = _only(status)
    with pytest.raises(RemoteError, match=rf"status {status} after {attempts}") as failed:
        _whole(folder)
    assert "expert_00, model.safetensors, bytes 0 to" in str(failed.value)


def test_a_server_that_knows_no_ranges_is_refused_by_the_first_answer(folder: FolderServer) -> None:
    folder.fault = _only("whole")
    with pytest.raises(RemoteError, match="knows no ranges") as failed:
        open_checkpoint(f"{folder.url}/expert_00", "expert")
    assert "download" in str(failed.value)
    assert len([r for r in folder.seen.of(WEIGHTS) if r[0] == "GET"]) == 1


def test_an_answer_with_another_range_is_refused(folder: FolderServer) -> None:
    folder.fault = _only("other")
    with pytest.raises(RemoteError, match="asked for bytes 0 to"):
        _whole(folder)


@pytest.mark.parametrize("times", [1, 100])
def test_bytes_that_a_server_compresses_unasked_are_refused_and_not_kept(
    folder: FolderServer, times: int
) -> None:
    left = iter(range(times))
    folder.fault = lambda method, path, number: (
        "gzip"
        if method == "GET" and "tokenizer.json" in path and next(left, None) is not None
        else None
    )
    expected = (folder.folder / "base" / "tokenizer.json").read_bytes()
    with RemoteSource(f"{folder.url}/base") as source:
        with pytest.raises(RemoteError, match="sends gzip"):
            source.read_range("tokenizer.json", 0, len(expected))
        folder.fault = lambda method, path, number: None
        assert source.read_range("tokenizer.json", 0, len(expected)) == expected


def test_every_read_is_of_the_file_that_was_listed(folder: FolderServer) -> None:
    with RemoteSource(f"{folder.url}/expert_00") as source:
        source.read_range(WEIGHTS, 0, 100)
        path = folder.folder / "expert_00" / WEIGHTS
        path.write_bytes(path.read_bytes()[::-1])
        with pytest.raises(CheckpointChangedError, match=r"expert_00, model\.safetensors"):
            source.read_range(WEIGHTS, 1000, 100)
    with RemoteSource(f"{folder.url}/expert_00") as source:
        assert source.read_range(WEIGHTS, 0, 100) == path.read_bytes()[:100]


@pytest.mark.parametrize("tags", ["time", "weak"])
def test_a_change_is_seen_by_the_time_where_a_server_gives_no_strong_etag(
    folder: FolderServer, caplog: pytest.LogCaptureFixture, tags: str
) -> None:
    folder.tags = tags
    soon = time.time() + 3600  # young however long the test takes
    for path in (folder.folder / "expert_00").iterdir():
        os.utime(path, (soon, soon))
    with pytest.raises(RemoteError, match=r"changed a moment ago.*strong ETag.*in a minute"):
        RemoteSource(f"{folder.url}/expert_00")
    for path in (folder.folder / "expert_00").iterdir():
        os.utime(path, (9, 9))
    with caplog.at_level(logging.WARNING, "mergepipe"):
        source = RemoteSource(f"{folder.url}/expert_00")
    assert "gives no strong ETag" in caplog.text
    with source:
        source.read_range(WEIGHTS, 0, 100)
        path = folder.folder / "expert_00" / WEIGHTS
        path.write_bytes(path.read_bytes())
        os.utime(path, (1, 1))
        with pytest.raises(CheckpointChangedError, match="tag 1970-01-01T00:00:01"):
            source.read_range(WEIGHTS, 1000, 100)


@pytest.mark.parametrize(("tags", "found"), [("none", "neither"), ("weak alone", "weak ETag W/")])
def test_a_server_that_tells_nothing_of_changes_is_refused(
    folder: FolderServer, tags: str, found: str
) -> None:
    folder.tags = tags
    with pytest.raises(RemoteError, match=found):
        RemoteSource(f"{folder.url}/expert_00")


def test_nothing_at_an_address_and_no_server_at_all_are_said(folder: FolderServer) -> None:
    with pytest.raises(RemoteError, match="Nothing lies at an address"):
        open_checkpoint(f"{folder.url}/nobody", "nobody")
    with pytest.raises(RemoteError, match=r"status ConnectError after 4 attempts"):
        open_checkpoint("http://127.0.0.1:9/folder", "nobody")


def test_a_server_that_refuses_every_file_is_said_to(folder: FolderServer) -> None:
    folder.fault = lambda method, path, number: 403
    with pytest.raises(RemoteError, match=r"status 403 \(refused\).*everybody may read them"):
        RemoteSource(f"{folder.url}/expert_00")


def test_a_web_page_in_place_of_every_file_is_taken_for_none(folder: FolderServer) -> None:
    folder.page = b"<!doctype html><title>Log in</title>"
    for place in ("private", f"private/{WEIGHTS}"):
        with pytest.raises(RemoteError, match=r"found web pages.*show a page to log in"):
            open_checkpoint(f"{folder.url}/{place}", "private")


def test_a_web_page_in_place_of_what_is_not_there_is_no_part_of_a_model(
    folder: FolderServer, family: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.page = b"<!doctype html><title>Our models</title>"
    with caplog.at_level(logging.WARNING, "mergepipe"):
        found = open_checkpoint(f"{folder.url}/expert_00", "expert")
    assert found.tensors == open_checkpoint(str(family / "expert_00"), "expert").tensors
    assert "gives web pages in place of adapter_config.json, adapter_model.safeten" in caplog.text
    with RemoteSource(f"{folder.url}/expert_00") as source:
        assert source.list() == sorted(p.name for p in (family / "expert_00").iterdir())


def test_only_bin_files_are_refused_with_what_converts_them(folder: FolderServer) -> None:
    (folder.folder / "old").mkdir()
    (folder.folder / "old" / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"download it, then `mergepipe convert`"):
        open_checkpoint(f"{folder.url}/old", "old")


def test_one_weight_file_may_be_meant_alone(folder: FolderServer, family: Path) -> None:
    found = open_checkpoint(f"{folder.url}/expert_00/{WEIGHTS}", "expert")
    local = open_checkpoint(str(family / "expert_00"), "expert")
    assert found.tensors == local.tensors


def test_an_s3_server_that_is_busy_for_ever_is_given_up_by_name(s3: ProxyServer) -> None:
    s3.fault = lambda method, path, number: 503 if path.endswith(WEIGHTS) else None
    with pytest.raises(RemoteError, match=r"models/family/base, model\.safetensors, bytes 0 to 8"):
        open_checkpoint("s3://models/family/base", "base")
    assert len(s3.seen.of(WEIGHTS)) == fetch.ATTEMPTS


def test_an_object_that_changes_underway_is_refused_by_its_etag(s3: ProxyServer) -> None:
    with RemoteSource("s3://models/family/base") as source:
        listing = source._listing
        file = listing.files[WEIGHTS]
        object.__setattr__(file, "tag", '"another"')
        with pytest.raises(CheckpointChangedError, match=r"base, model\.safetensors"):
            source.read_range(WEIGHTS, 0, 100)


def test_a_bucket_that_is_not_there_or_closed_says_so(s3: ProxyServer) -> None:
    with pytest.raises(RemoteError, match="s3://nobody/here"):
        open_checkpoint("s3://nobody/here", "nobody")
    s3.fault = lambda method, path, number: 403
    with pytest.raises(RemoteError, match="A server refuses"):
        open_checkpoint("s3://models/family/base", "base")


def test_without_the_packages_an_address_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(clients, "import_module", missing)
    for address in ("s3://bucket/model", "http://host/model", "hf://org/model"):
        with pytest.raises(RemoteError, match=r"pip install 'mergepipe-pipeline\[remote\]'"):
            RemoteSource(address)
