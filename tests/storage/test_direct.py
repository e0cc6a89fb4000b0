"""Files written past the page cache hold what was appended, whatever the file system can do."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.storage import uncached
from mergepipe_pipeline.storage.uncached import DirectFile, cached_nbytes
from tests.support.laws import examples

PIECE = 4 << 20


def noise(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def write(path: Path, data: bytes, step: int) -> None:
    file = DirectFile(path, len(data))
    for start in range(0, len(data), step):
        file.append(memoryview(data)[start : start + step])
    file.close()


@pytest.mark.parametrize(
    "nbytes", [0, 1, 4095, 4096, PIECE - 1, PIECE, PIECE + 1, PIECE + 4096, 6 * PIECE + 12345]
)
@pytest.mark.parametrize("step", [PIECE, 1_000_003])
def test_a_file_holds_what_was_appended(tmp_path: Path, nbytes: int, step: int) -> None:
    data = noise(nbytes)
    write(tmp_path / "x", data, step)
    assert (tmp_path / "x").read_bytes() == data


@settings(max_examples=examples(25), deadline=None)
@given(steps=st.lists(st.integers(1, 3 * PIECE), min_size=1, max_size=8))
def test_it_does_whatever_the_pieces(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    data = noise(sum(steps))
    path = tmp_path_factory.mktemp("direct") / "x"
    file, at = DirectFile(path, len(data)), 0
    for step in steps:
        file.append(memoryview(data)[at : at + step])
        at += step
    file.close()
    assert path.read_bytes() == data


@pytest.mark.usefixtures("durable_writes")
def test_a_large_file_leaves_little_in_the_page_cache(tmp_path: Path) -> None:
    write(tmp_path / "x", noise(8 * PIECE + 5), PIECE)
    with (tmp_path / "x").open("rb") as file:
        cached = cached_nbytes(file.fileno(), 0, 8 * PIECE + 5)
    if cached is None or not _is_direct(tmp_path):
        pytest.skip("this system cannot write past its page cache, or cannot tell")
    assert cached <= PIECE


def _is_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.pwrite

    def refused(handle: int, data: memoryview, at: int) -> int:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(handle, data, at)

    monkeypatch.setattr(os, "pwrite", refused)
    data = noise(2 * PIECE + 77)
    write(tmp_path / "x", data, PIECE)
    assert (tmp_path / "x").read_bytes() == data


def test_short_direct_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: real(handle, data[:5000], at))
    data = noise(PIECE + 9000)
    write(tmp_path / "x", data, PIECE)
    assert (tmp_path / "x").read_bytes() == data


def test_what_fails_behind_the_back_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    file = DirectFile(tmp_path / "x", 9 * PIECE)
    with pytest.raises(OSError, match="full"):
        file.append(memoryview(bytes(9 * PIECE)))
    file.abandon()
    monkeypatch.undo()
    write(tmp_path / "y", noise(3 * PIECE), PIECE)  # its pieces are clean again
    assert (tmp_path / "y").read_bytes() == noise(3 * PIECE)


def test_no_space_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="full"):
        DirectFile(tmp_path / "x", 10)
    assert list(tmp_path.iterdir()) == []


def test_pieces_are_used_again(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / name, noise(7 * PIECE), PIECE)
    assert 1 <= len(uncached._pieces) <= 4


def test_a_process_and_its_fork_write_what_is_theirs(tmp_path: Path) -> None:
    first = DirectFile(tmp_path / "first", 4)  # whose piece is used again
    first.append(memoryview(b"done"))
    first.close()
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            theirs = DirectFile(tmp_path / "theirs", 4)
            os.read(to_child[0], 1)
            theirs.append(memoryview(b"xxxx"))
            os.write(to_parent[1], b"x")
        finally:
            os._exit(0)
    ours = DirectFile(tmp_path / "ours", 4)
    ours.append(memoryview(b"ours"))
    os.write(to_child[1], b"x")
    os.read(to_parent[0], 1)
    os.waitpid(child, 0)
    ours.close()
    for end in (*to_child, *to_parent):
        os.close(end)
    assert (tmp_path / "ours").read_bytes() == b"ours"
