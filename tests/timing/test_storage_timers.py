"""Cold reads and durable writes: what is timed, and that a cached file is no cold one."""

from __future__ import annotations

import mmap
import os
from itertools import count
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.timing import storage_timers
from mergepipe_pipeline.timing.storage_timers import CHUNK_NBYTES, ColdFile, resident_share, write_s

pytestmark = pytest.mark.usefixtures("durable_writes")

NBYTES = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A durable file of 1 MiB."""
    path = tmp_path / "file"
    write_s(path, NBYTES)
    return path


def share_of(path: Path) -> float:
    with path.open("rb") as file:
        return resident_share(file.fileno(), path.stat().st_size)


def test_what_was_read_is_in_memory_and_what_was_dropped_is_not(path: Path) -> None:
    path.read_bytes()
    assert share_of(path) == 1
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if share_of(path):
        pytest.skip("this file system keeps files in memory")
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 1, 5 * mmap.PAGESIZE)
    assert 0 < share_of(path) < 0.25


def test_a_file_without_bytes_is_nowhere_in_memory(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert share_of(tmp_path / "empty") == 0


def test_all_places_are_read_between_two_looks_at_the_clock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_timers, "resident_share", lambda handle, nbytes: 0.0)
    reads: list[tuple[int, int]] = []
    whole = os.preadv

    def preadv(handle: int, buffers: list[memoryview], at: int) -> int:
        reads.append((at, len(buffers[0])))
        return whole(handle, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    ticks = count(0.0, 7.0)
    with ColdFile(path, lambda: next(ticks)) as file:
        assert file.nbytes == NBYTES
        assert file.read_s([8192, 0], 4096) == 7.0
        assert reads == [(8192, 4096), (0, 4096)]
        reads.clear()
        file.read_s([0], 2 * CHUNK_NBYTES + 1)
        assert reads == [(0, CHUNK_NBYTES), (CHUNK_NBYTES, CHUNK_NBYTES), (2 * CHUNK_NBYTES, 1)]


def test_a_file_that_stays_in_memory_is_refused_with_its_share_and_another_way(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_timers, "resident_share", lambda handle, nbytes: 0.5)
    with (
        ColdFile(path) as file,
        pytest.raises(MergePipeError, match=r"stays in the page cache.*50 % of it.*another file"),
    ):
        file.read_s([0], 4096)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no file system in memory here")
def test_a_file_system_in_memory_is_refused() -> None:
    path = Path(f"/dev/shm/mergepipe-test-{os.getpid()}")
    try:
        write_s(path, NBYTES)
        with (
            ColdFile(path) as file,
            pytest.raises(MergePipeError, match=r"100 % of it in memory"),
        ):
            file.read_s([0], 4096)
    finally:
        path.unlink()


def test_a_system_that_cannot_drop_pages_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    with (
        ColdFile(path) as file,
        pytest.raises(MergePipeError, match="a system without posix_fadvise"),
    ):
        file.read_s([0], 4096)


def test_a_written_file_is_whole_and_timed(tmp_path: Path) -> None:
    ticks = count(0.0, 3.0)
    nbytes = CHUNK_NBYTES + 5
    assert write_s(tmp_path / "new", nbytes, lambda: next(ticks)) == 3.0
    assert (tmp_path / "new").stat().st_size == nbytes
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
