"""Downloads on disk: no byte is asked for twice, and nothing that is damaged is believed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.errors import MergePipeError, StorageFullError
from mergepipe_pipeline.remote import ranges as pieces
from mergepipe_pipeline.remote.downloads import DownloadedFile
from mergepipe_pipeline.remote.egress import coalesced
from mergepipe_pipeline.remote.listing import RemoteFile
from mergepipe_pipeline.remote.ranges import Pieces, Run
from mergepipe_pipeline.remote.source import RemoteSource
from mergepipe_pipeline.storage.source import FileRange
from tests.remote.servers import FolderServer

DATA = bytes(range(256)) * 2000
RANGES = st.lists(
    st.tuples(
        st.sampled_from(["read", "begin", "expect"]),
        st.integers(0, len(DATA)),
        st.integers(0, 70_000),
    ),
    max_size=12,
)


@given(RANGES)
def test_in_whatever_order_a_file_is_read_its_bytes_are_right_and_asked_for_once(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[str, int, int]]
) -> None:
    fetched: list[tuple[int, int]] = []

    def fetch(start: int, stop: int) -> bytearray:
        fetched.append((start, stop))
        return bytearray(DATA[start:stop])

    folder = tmp_path_factory.mktemp("pieces")
    with ThreadPoolExecutor(3) as pool:
        file = DownloadedFile("f", "k" * 32, fetch, Pieces(folder, 1 << 30), pool)
        for act, start, length in asked:
            stop = min(len(DATA), start + length)
            if act == "read":
                out = bytearray(stop - start)
                file.read_into(start, memoryview(out))
                assert out == DATA[start:stop]
            elif start < stop:
                (file.begin if act == "begin" else file.expect)(start, stop)
    taken = sorted(fetched)
    assert all(a[1] <= b[0] for a, b in pairwise(taken))
    again = DownloadedFile("f", "k" * 32, fetch, Pieces(folder, 1 << 30), pool)
    fetched.clear()
    for start, stop in taken:
        out = bytearray(stop - start)
        again.read_into(start, memoryview(out))
        assert out == DATA[start:stop]
    assert fetched == []


def test_a_piece_that_was_on_its_way_when_a_lie_was_found_is_not_kept(tmp_path: Path) -> None:
    kept, lies = Pieces(tmp_path, 1 << 30), [True]
    data = bytes(DATA)
    stated = RemoteFile("f", len(data), "tag", sha256_hex(data))

    def fetch(start: int, stop: int) -> bytearray:
        if not lies:
            return bytearray(data[start:stop])
        lies.clear()
        file.drop_unproved()  # another file of the server is found to be a lie
        return bytearray(stop - start)

    with ThreadPoolExecutor(1) as pool:
        file = DownloadedFile("f", "k" * 32, fetch, kept, pool, stated)
        file.begin(0, 10)
    assert list(kept.runs("k" * 32)) == []
    with ThreadPoolExecutor(1) as pool:
        again = DownloadedFile("f", "k" * 32, fetch, kept, pool, stated)
        out = bytearray(len(data))
        again.read_into(0, memoryview(out))
    assert out == data


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5000), st.integers(0, 900))),
    st.integers(0, 2000),
)
def test_requests_cover_all_ranges_and_little_besides(
    told: list[tuple[str, int, int]], gap: int
) -> None:
    ranges = [FileRange(path, start, start + n) for path, start, n in told]
    found = coalesced(ranges, gap)
    wanted = {(p, i) for p, a, b in ranges for i in range(a, b)}
    covered = {(p, i) for p, a, b in found for i in range(a, b)}
    assert wanted <= covered
    assert len(covered) <= 1.01 * sum(b - a for _, a, b in ranges)


def test_a_flipped_bit_of_a_piece_is_seen_and_fetched_again(
    folder: FolderServer, fresh_downloads: Path
) -> None:
    expected = (folder.folder / "base" / "model.safetensors").read_bytes()
    address = f"{folder.url}/base"
    with RemoteSource(address) as source:
        source.read_range("model.safetensors", 0, len(expected))
    (piece,) = (p for p in fresh_downloads.rglob("*") if p.is_file())
    data = bytearray(piece.read_bytes())
    data[len(data) // 2] ^= 4
    piece.write_bytes(data)
    with RemoteSource(address) as source:
        assert source.read_range("model.safetensors", 0, len(expected)) == expected
    assert len([r for r in folder.seen.of("base/model.s") if r[0] == "GET"]) == 2


def test_what_was_used_longest_ago_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LEAST_NBYTES", 0)
    store = Pieces(tmp_path, 1_000_000)
    for number in range(5):
        store.put("a" * 32, number * 200_000, bytearray(180_000))
        path = store._path("a" * 32, Run(number * 200_000, number * 200_000 + 180_000))
        os.utime(path, ns=(number, number))
    other = Pieces(tmp_path, 1_000_000)
    assert other.read("a" * 32, Run(0, 180_000), 0, memoryview(bytearray(10)))
    other.put("a" * 32, 5 * 200_000, bytearray(180_000))
    left = {run.start_byte // 200_000 for run in store.runs("a" * 32)}
    assert left == {0, 3, 4, 5}


def test_a_folder_that_takes_no_downloads_is_named_with_what_names_another(
    folder: FolderServer, fresh_downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_downloads.write_text("a file")
    for place in (fresh_downloads, Path("/proc/nobody")):
        monkeypatch.setenv("MERGEPIPE_DOWNLOADS", str(place))
        with (
            RemoteSource(f"{folder.url}/base") as source,
            pytest.raises(MergePipeError, match=rf"{place}.*another folder: MERGEPIPE_DOWNLOADS"),
        ):
            source.read_range("model.safetensors", 0, 100)


def test_a_disk_that_is_full_of_downloads_is_told_with_what_limits_them_and_reading_goes_on(
    folder: FolderServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with RemoteSource(f"{folder.url}/base") as source:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            with pytest.raises(StorageFullError, match=r"MERGEPIPE_DOWNLOADS, .*_CACHE_LIMIT"):
                source.read_range("model.safetensors", 0, 100)
        assert len(source.read_range("model.safetensors", 0, 100)) == 100


_READER = """
import sys
from mergepipe_pipeline.remote.source import RemoteSource
with RemoteSource(sys.argv[1]) as source:
    print(source.read_range("model.safetensors", 0, source.size("model.safetensors"))[::997].hex())
"""


def _reader(address: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _READER, address], stdout=subprocess.PIPE, text=True
    )


def test_processes_share_downloads_and_a_killed_one_leaves_nothing_wrong(
    folder: FolderServer, fresh_downloads: Path
) -> None:
    expected = (folder.folder / "base" / "model.safetensors").read_bytes()[::997].hex()
    address, reached = f"{folder.url}/base", threading.Event()

    def slow(method: str, path: str, number: int) -> None:
        if method == "GET" and path.endswith("model.safetensors"):
            reached.set()
            time.sleep(0.3)

    folder.fault = slow
    killed = _reader(address)
    assert reached.wait(60)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    both = [_reader(address), _reader(address)]
    assert [r.communicate(timeout=60)[0].strip() for r in both] == [expected, expected]
    folder.seen.requests.clear()
    assert _reader(address).communicate(timeout=60)[0].strip() == expected
    assert [r for r in folder.seen.of("model.safetensors") if r[0] == "GET"] == []
