"""An expert's files move away only when the pack gives them back, and come back bit for bit."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import (
    CheckpointChangedError,
    CorruptionError,
    MergePipeError,
    NotFoundError,
)
from mergepipe_pipeline.packs.index import frames_path
from mergepipe_pipeline.resolution.locate import Places, locate_registered
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold, unpack
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.models import base_tensors, expert_tensors, warehouse_of
from tests.support.stored import write


def files_in(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Path to bytes and time of all files."""
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file()
    }


def with_side_files(tmp: Path) -> tuple[Warehouse, dict[str, tuple[bytes, int]]]:
    """A warehouse whose expert has files beside its weights."""
    warehouse = warehouse_of(tmp)
    (tmp / "e0" / "config.json").write_text('{"architectures": ["Toy"]}')
    (tmp / "e0" / "notes").mkdir()
    (tmp / "e0" / "notes" / "read.me").write_bytes(bytes(range(256)) * 50)
    (tmp / "e0" / "empty").touch()
    return warehouse, files_in(tmp / "e0")


def test_a_replaced_expert_comes_back_bit_for_bit_with_all_its_files(tmp_path: Path) -> None:
    warehouse, before = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    moved = move_to_cold(warehouse, made, tmp_path / "cold")
    assert not (tmp_path / "e0").exists()
    assert files_in(tmp_path / "cold" / "e0") == before
    assert moved.files == len(before)
    kept = sum(p.stat().st_size for p in warehouse.replaced_dir.rglob("*"))
    assert kept < 40_000
    assert locate_registered(warehouse, "e0").checkpoint.is_away
    assert [a.name for a in analyze(warehouse)] == ["base"]
    assert pack(warehouse) == ()
    report = verify_all(warehouse)
    assert report.ok
    assert report.notes == ("in cold storage, and compared as packs and bases give them: e0",)
    unpack(warehouse, "e0", tmp_path / "elsewhere")
    assert files_in(tmp_path / "elsewhere") == before
    unpack(warehouse, "e0")
    assert files_in(tmp_path / "e0") == before
    assert warehouse.replaced.ids() == []
    assert not pack(warehouse, ["e0"])[0].fresh
    with pytest.raises(NotFoundError, match="not moved away"):
        unpack(warehouse, "e0")


def test_files_are_copied_compared_and_removed_where_they_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse, before = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])

    def refuse(step: str) -> None:
        if step == "rename":
            monkeypatch.setattr(atomic, "crash_hook", None)
            raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(atomic, "crash_hook", refuse)
    move_to_cold(warehouse, made, tmp_path / "cold")
    assert not (tmp_path / "e0").exists()
    assert files_in(tmp_path / "cold" / "e0") == before


def test_nothing_moves_when_a_frame_is_damaged(tmp_path: Path) -> None:
    warehouse, before = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    path = frames_path(warehouse.packs.path(made.pack_id), "X20")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="X20"):
        move_to_cold(warehouse, made, tmp_path / "cold")
    assert files_in(tmp_path / "e0") == before
    assert not (tmp_path / "cold").exists()


def test_another_base_is_named_and_gives_nothing_back(tmp_path: Path) -> None:
    warehouse, _ = with_side_files(tmp_path)
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")
    write(tmp_path / "base", "base", base_tensors(9))
    with pytest.raises(CorruptionError, match=r"not the one .* packed against.*tensor"):
        unpack(warehouse, "e0")
    assert not (tmp_path / "e0").exists()


def test_replacing_again_after_unpack_takes_the_copy_in_cold_storage_if_it_is_the_same(
    tmp_path: Path,
) -> None:
    warehouse, before = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    first = move_to_cold(warehouse, made, tmp_path / "cold")
    again = move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")
    assert again == replace(first, before=True)
    unpack(warehouse, "e0")
    assert not move_to_cold(warehouse, made, tmp_path / "cold").before
    assert not (tmp_path / "e0").exists()
    assert files_in(tmp_path / "cold" / "e0") == before
    unpack(warehouse, "e0")
    with (tmp_path / "cold" / "e0" / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(MergePipeError, match="other files"):
        move_to_cold(warehouse, made, tmp_path / "cold")
    assert files_in(tmp_path / "e0") == before


@pytest.mark.parametrize("how", ["links", "hard links", "a link in a folder", "the folder itself"])
def test_a_copy_that_is_the_original_under_another_path_is_not_taken_for_one(
    tmp_path: Path, how: str
) -> None:
    warehouse, before = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    root, cold = tmp_path / "e0", tmp_path / "cold" / "e0"
    cold.parent.mkdir()
    if how == "the folder itself":
        given = tmp_path
    else:
        given = cold.parent
        shutil.copytree(root, cold)
    if how == "a link in a folder":
        (cold / "notes" / "read.me").unlink()
        (cold / "notes" / "read.me").symlink_to(root / "notes" / "read.me")
    elif how in ("links", "hard links"):
        for path in [p for p in cold.rglob("*") if p.is_file()]:
            path.unlink()
            of = root / path.relative_to(cold)
            path.symlink_to(of) if how == "links" else path.hardlink_to(of)
    with pytest.raises(MergePipeError, match=r"cannot be moved|place .* is taken"):
        move_to_cold(warehouse, made, given)
    assert files_in(root) == before


def test_what_cannot_be_given_back_is_not_moved(tmp_path: Path) -> None:
    warehouse, before = with_side_files(tmp_path)
    (lossy,) = pack(warehouse, ["e0"], tiers=("L0",))
    with pytest.raises(MergePipeError, match="cannot be moved"):
        move_to_cold(warehouse, lossy, tmp_path / "cold")
    (made,) = pack(warehouse, ["e0"])
    (tmp_path / "cold" / "e0").mkdir(parents=True)
    with pytest.raises(MergePipeError, match="other files"):
        move_to_cold(warehouse, made, tmp_path / "cold")
    os.symlink("/etc/hostname", tmp_path / "e0" / "link")
    with pytest.raises(MergePipeError, match="no plain file"):
        move_to_cold(warehouse, made, tmp_path / "other")
    (tmp_path / "e0" / "link").unlink()
    assert files_in(tmp_path / "e0") == before


def moved_twice(tmp: Path) -> tuple[Warehouse, dict[str, tuple[bytes, int]], str]:
    """A warehouse whose e0 was moved away and has a later version; the older one's files and id."""
    warehouse, before = with_side_files(tmp)
    checkpoint_id = warehouse.catalog.get("e0").checkpoint.checkpoint_id
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp / "cold")
    (tmp / "e0").mkdir()
    write(tmp / "e0", "e0", expert_tensors(base_tensors(), 7))
    assert register(warehouse, tmp / "e0", "e0", "base").version == 2
    return warehouse, before, checkpoint_id


def test_an_older_version_that_was_moved_away_comes_back_by_number_or_id(tmp_path: Path) -> None:
    warehouse, before, checkpoint_id = moved_twice(tmp_path)
    now = files_in(tmp_path / "e0")
    with pytest.raises(NotFoundError, match="mergepipe unpack e0@1"):
        unpack(warehouse, "e0")
    with pytest.raises(MergePipeError, match=r"place .* is taken"):
        unpack(warehouse, "e0@1")
    with pytest.raises(CheckpointChangedError, match="mergepipe unpack e0@1 --to"):
        Places(warehouse).locate("e0", revision="1")
    asked = ["--home", str(warehouse.root), "unpack", "e0@1", "--to", str(tmp_path / "by_number")]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert f"e0@1: {len(before)} files" in done.output
    unpack(warehouse, f"e0@{checkpoint_id[:8]}", tmp_path / "by_id")
    rest = warehouse.replaced.rest(checkpoint_id, 0)
    data = rest.read_bytes()
    rest.write_bytes(b"other")
    with pytest.raises(CorruptionError, match=r"use the original.*place .* is taken"):
        unpack(warehouse, "e0@1", tmp_path / "never")
    rest.write_bytes(data)
    for made in ("by_number", "by_id"):
        assert files_in(tmp_path / made) == before
    assert files_in(tmp_path / "e0") == now
    assert warehouse.replaced.ids() == [checkpoint_id]
    # Both are away, and either comes back to its place.
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "colder")
    unpack(warehouse, "e0@1")
    assert files_in(tmp_path / "e0") == before
    assert checkpoint_id not in warehouse.replaced.ids()
    (tmp_path / "e0").rename(tmp_path / "aside")
    unpack(warehouse, "e0@2")
    assert files_in(tmp_path / "e0") == now
    assert warehouse.replaced.ids() == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("e0@7", r"no such revision.*1 \("),
        ("e9@1", "e9"),
        ("e0@1@2", "several `@`"),
        ("e0@", "either side of `@`"),
    ],
)
def test_a_version_that_there_is_none_of_is_refused(tmp_path: Path, text: str, words: str) -> None:
    warehouse, _, _ = moved_twice(tmp_path)
    with pytest.raises(MergePipeError, match=words):
        unpack(warehouse, text)


@pytest.mark.parametrize("what", ["index", "chunks", "checksums"])
def test_where_the_pack_of_an_expert_that_is_away_is_truncated_the_original_is_named(
    tmp_path: Path, what: str
) -> None:
    warehouse, _ = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    move_to_cold(warehouse, made, tmp_path / "cold")
    (path,) = warehouse.packs.path(made.pack_id).glob(f"{what}.*.parquet")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CorruptionError) as caught:
        unpack(warehouse, "e0")
    assert caught.value.where == str(path)
    told = str(caught.value)
    assert f"copy {tmp_path / 'cold' / 'e0'} to " in told
    assert "delete" not in told
    assert "bytes -" not in told


_KILLED = """
import os, signal, sys
from mergepipe_pipeline.verbs import replace
from mergepipe_pipeline.warehouse import Warehouse
replace.publish_dir = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
replace.unpack(Warehouse.at(sys.argv[1]), "e0")
"""


def test_what_a_killed_unpack_has_written_is_gone_after_the_next_one(tmp_path: Path) -> None:
    warehouse, before = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    move_to_cold(warehouse, made, tmp_path / "cold")
    done = subprocess.run([sys.executable, "-c", _KILLED, str(warehouse.root)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.glob(".e0*")] != []
    unpack(warehouse, "e0")
    assert [p.name for p in tmp_path.glob(".e0*")] == []
    assert files_in(tmp_path / "e0") == before
