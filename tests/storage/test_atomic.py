"""A name appears whole or not at all, whatever step a crash hits."""

from __future__ import annotations

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import StorageFullError
from mergepipe_pipeline.storage import atomic
from tests.snapshots.tiny import Crash, count_steps, crash_at


def test_write_atomic_leaves_old_or_new_content_at_every_crash(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for step in range(count_steps(lambda: atomic.write_atomic(path, b"old"))):
        crash_at(step)
        with pytest.raises(Crash, match=r"write|replace"):
            atomic.write_atomic(path, b"new")
        assert path.read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir()] == ["f"]
    atomic.crash_hook = None
    atomic.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_new_name_does_not_appear_before_its_content(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "f"
    for step in range(2):
        crash_at(step)
        with pytest.raises(Crash, match=r"write|link"):
            atomic.create_exclusive(path, b"new")
        assert not path.exists()


def test_one_of_many_threads_creates_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f"

    def create(i: int) -> bool:
        try:
            atomic.create_exclusive(path, f"writer {i}".encode() * 1000)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(create, range(32)))
    assert won.count(True) == 1
    assert path.read_bytes() == f"writer {won.index(True)}".encode() * 1000
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_an_exclusive_name_that_exists_keeps_its_content(tmp_path: Path) -> None:
    atomic.create_exclusive(tmp_path / "f", b"first")
    with pytest.raises(FileExistsError, match="f"):
        atomic.create_exclusive(tmp_path / "f", b"second")
    assert (tmp_path / "f").read_bytes() == b"first"


def test_adopting_moves_the_file_or_leaves_it(tmp_path: Path) -> None:
    temp, final = tmp_path / "temp", tmp_path / "sub" / "final"
    temp.write_bytes(b"x")
    crash_at(0)
    with pytest.raises(Crash, match="adopt"):
        atomic.adopt_file(temp, final)
    assert temp.exists()
    assert not final.exists()
    atomic.crash_hook = None
    atomic.adopt_file(temp, final)
    assert (temp.exists(), final.read_bytes()) == (False, b"x")


def test_a_folder_is_published_once_and_a_second_one_is_left_alone(tmp_path: Path) -> None:
    final = tmp_path / "out" / "final"
    for name in ("one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "f").write_text(name)
    assert atomic.publish_dir(tmp_path / "one", final)
    assert not atomic.publish_dir(tmp_path / "two", final)
    assert (final / "deep" / "f").read_text() == "one"
    assert (tmp_path / "two" / "deep" / "f").read_text() == "two"
    assert not (tmp_path / "one").exists()


def test_a_folder_takes_the_place_of_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "f").write_text("x")
    (tmp_path / "final").mkdir()
    assert atomic.publish_dir(tmp_path / "staged", tmp_path / "final")
    assert (tmp_path / "final" / "f").read_text() == "x"


def test_a_crash_before_publishing_leaves_the_staged_folder(tmp_path: Path) -> None:
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "f").write_text("x")
    crash_at(0)
    with pytest.raises(Crash, match="publish"):
        atomic.publish_dir(tmp_path / "staged", tmp_path / "final")
    assert not (tmp_path / "final").exists()
    assert (tmp_path / "staged" / "f").exists()


def test_a_link_shares_the_file_and_becomes_a_copy_across_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    atomic.link_file(source, tmp_path / "link")
    assert (tmp_path / "link").samefile(source)

    def across(*args: object) -> None:
        raise OSError(errno.EXDEV, "across devices")

    monkeypatch.setattr(os, "link", across)
    atomic.link_file(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"x"
    assert not (tmp_path / "copy").samefile(source)


def test_a_copy_is_writable_and_independent(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    source.chmod(0o444)
    atomic.copy_file(source, tmp_path / "copy")
    (tmp_path / "copy").write_bytes(b"y")
    assert source.read_bytes() == b"x"


def test_removing_takes_files_folders_and_links_and_forgives_absence(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("folder", "file", "link", "absent"):
        atomic.remove_tree(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_the_old_content_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    atomic.write_atomic(tmp_path / "f", b"old")

    def full(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError, match=r"disk is full.*/f"):
        atomic.write_atomic(tmp_path / "f", b"new")
    monkeypatch.undo()
    assert (tmp_path / "f").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


CANNOT = [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM]


@pytest.mark.parametrize("number", CANNOT)
@pytest.mark.parametrize("first", [0, 7])
def test_a_copy_is_whole_where_the_kernel_copies_nothing_or_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, first: int
) -> None:
    data = bytes(range(256)) * 100
    (tmp_path / "source").write_bytes(data)
    real, asked = os.copy_file_range, [0]

    def some(source: int, target: int, nbytes: int) -> int:
        asked[0] += 1
        if first and asked[0] == 1:
            return real(source, target, first)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", some)
    atomic.copy_file(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    assert asked[0] == (2 if first else 1)


@pytest.mark.parametrize("most", [0, 1000])
def test_a_copy_is_whole_where_the_kernel_stops_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    data = bytes(range(256)) * 100
    (tmp_path / "source").write_bytes(data)
    real = os.copy_file_range

    def few(source: int, target: int, nbytes: int) -> int:
        return real(source, target, min(nbytes, most)) if most else 0

    monkeypatch.setattr(os, "copy_file_range", few)
    atomic.copy_file(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


def test_the_kernel_copies_files_and_python_sees_none_of_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 100
    (tmp_path / "source").write_bytes(data)
    monkeypatch.setattr(shutil, "copyfile", None)
    atomic.copy_file(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_copy_onto_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    (tmp_path / "source").write_bytes(b"x")
    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(StorageFullError, match=r"disk is full.*copy"):
        atomic.copy_file(tmp_path / "source", tmp_path / "copy")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_takes_the_place_of_another_and_readers_see_one_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:  # a flag that no system knows
        monkeypatch.setattr(atomic, "_EXCHANGE", 1 << 20)
    staged, final = tmp_path / "staged", tmp_path / "final"
    for folder in (staged, final):
        folder.mkdir()
        (folder / folder.name).write_bytes(b"x")

    def look(step: str) -> None:
        assert can_exchange is False or (final / "final").exists()

    atomic.crash_hook = look
    atomic.replace_dir(staged, final)
    assert (final / "staged").exists()
    assert (staged / "final").exists()
    assert len(list(tmp_path.iterdir())) == 2
