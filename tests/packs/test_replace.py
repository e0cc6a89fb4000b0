"""An expert's files move away only when the pack gives them back, and come back bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from mergepipe_pipeline.packs.offline import leftover
from mergepipe_pipeline.resolution.locate import Places, locate_registered
from mergepipe_pipeline.verbs import replace as module
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold, unpack, write_weights
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


def beside(files: dict[str, tuple[bytes, int]]) -> dict[str, tuple[bytes, int]]:
    """Those that are no weight files."""
    return {path: file for path, file in files.items() if not path.endswith(".safetensors")}


def weights(files: dict[str, tuple[bytes, int]]) -> dict[str, tuple[bytes, int]]:
    """The weight files."""
    return {path: file for path, file in files.items() if path.endswith(".safetensors")}


def test_weights_of_a_replaced_expert_come_back_bit_for_bit_and_the_rest_stays(
    tmp_path: Path,
) -> None:
    warehouse, before = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    moved = move_to_cold(warehouse, made, tmp_path / "cold")
    assert files_in(tmp_path / "e0") == beside(before)
    assert files_in(tmp_path / "cold" / "e0") == weights(before)
    assert moved.files == 1
    kept = sum(p.stat().st_size for p in warehouse.offline_dir.rglob("*"))
    assert kept < 40_000
    assert locate_registered(warehouse, "e0").checkpoint.is_offline
    assert Places(warehouse).locate(str(tmp_path / "e0")).is_offline
    assert [a.name for a in analyze(warehouse)] == ["base"]
    assert pack(warehouse) == ()
    report = verify_all(warehouse)
    assert report.ok
    assert report.notes == ("in cold storage, and compared as packs and bases give them: e0",)
    unpack(warehouse, "e0", tmp_path / "elsewhere")
    known = {"e0.safetensors", "config.json"}  # what goes with a model, by the list of merges
    made_again = {path: data for path, (data, _) in files_in(tmp_path / "elsewhere").items()}
    assert made_again == {path: before[path][0] for path in known}
    unpack(warehouse, "e0")
    assert files_in(tmp_path / "e0") == before
    assert warehouse.offline.ids() == []
    assert not pack(warehouse, ["e0"])[0].fresh
    assert warehouse.catalog.get("e0").version == 1
    with pytest.raises(NotFoundError, match="not moved away"):
        unpack(warehouse, "e0")


def test_nothing_moves_when_a_frame_is_damaged(tmp_path: Path) -> None:
    warehouse, before = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    path = frames_path(warehouse.packs.path(made.pack_id), "X")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="X"):
        move_to_cold(warehouse, made, tmp_path / "cold")
    assert files_in(tmp_path / "e0") == before
    assert not (tmp_path / "cold").exists()
    assert warehouse.offline.ids() == []


def test_another_base_is_named_and_gives_nothing_back(tmp_path: Path) -> None:
    warehouse, before = with_side_files(tmp_path)
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")
    write(tmp_path / "base", "base", base_tensors(9))
    with pytest.raises(CorruptionError, match=r"not the one .* packed against.*tensor"):
        unpack(warehouse, "e0")
    assert files_in(tmp_path / "e0") == beside(before)


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
    assert files_in(tmp_path / "cold" / "e0") == weights(before)
    unpack(warehouse, "e0")
    with (tmp_path / "cold" / "e0" / "e0.safetensors").open("a") as file:
        file.write(" ")
    with pytest.raises(MergePipeError, match="another file"):
        move_to_cold(warehouse, made, tmp_path / "cold")
    assert files_in(tmp_path / "e0") == before
    assert warehouse.offline.ids() == []


@pytest.mark.parametrize("how", ["a link", "the folder itself", "a link to the folder"])
def test_a_copy_that_is_the_original_under_another_path_is_not_taken_for_one(
    tmp_path: Path, how: str
) -> None:
    warehouse, before = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    root, cold = tmp_path / "e0", tmp_path / "cold" / "e0"
    cold.parent.mkdir()
    if how == "a link":
        cold.mkdir()
        (cold / "e0.safetensors").symlink_to(root / "e0.safetensors")
    elif how == "a link to the folder":
        cold.symlink_to(root)
    with pytest.raises(MergePipeError, match=r"cannot be moved|place .* is taken"):
        move_to_cold(warehouse, made, tmp_path if how == "the folder itself" else cold.parent)
    assert files_in(root) == before


def test_a_file_with_a_second_name_elsewhere_keeps_that(tmp_path: Path) -> None:
    warehouse, before = with_side_files(tmp_path)
    twin = tmp_path / "twin.safetensors"
    twin.hardlink_to(tmp_path / "e0" / "e0.safetensors")
    (made,) = pack(warehouse, ["e0"])
    move_to_cold(warehouse, made, tmp_path / "cold")
    assert twin.read_bytes() == before["e0.safetensors"][0]
    unpack(warehouse, "e0")
    assert files_in(tmp_path / "e0") == before


def test_what_cannot_be_given_back_is_not_moved(tmp_path: Path) -> None:
    warehouse, before = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    linked = tmp_path / "e0" / "e0.safetensors"
    linked.rename(tmp_path / "e0" / "blob")
    linked.symlink_to(tmp_path / "e0" / "blob")
    register(warehouse, tmp_path / "e0", "e0", "base")
    with pytest.raises(MergePipeError, match="no plain file"):
        move_to_cold(warehouse, made, tmp_path / "other")
    linked.unlink()
    (tmp_path / "e0" / "blob").rename(linked)
    (tmp_path / "e0" / "consolidated.safetensors").write_bytes(linked.read_bytes())
    with pytest.raises(MergePipeError, match=r"weights beside it: consolidated"):
        move_to_cold(warehouse, made, tmp_path / "other")
    assert {**before} == {
        path: file for path, file in files_in(tmp_path / "e0").items() if path in before
    }


def moved_twice(tmp: Path) -> tuple[Warehouse, dict[str, tuple[bytes, int]], str]:
    """A warehouse whose e0 was moved away and has a later version; the older one's files and id."""
    warehouse, before = with_side_files(tmp)
    checkpoint_id = warehouse.catalog.get("e0").checkpoint.checkpoint_id
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp / "cold")
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
    assert "e0@1: 1 weight file" in done.output
    unpack(warehouse, f"e0@{checkpoint_id[:8]}", tmp_path / "by_id")
    rest = leftover(warehouse.offline.path(checkpoint_id), 0)
    data = rest.read_bytes()
    rest.write_bytes(b"other")
    with pytest.raises(CorruptionError, match=r"use the original.*place .* is taken"):
        unpack(warehouse, "e0@1", tmp_path / "never")
    rest.write_bytes(data)
    for made in ("by_number", "by_id"):  # without what may be of the later version
        assert files_in(tmp_path / made) == weights(before)
    assert files_in(tmp_path / "e0") == now
    assert warehouse.offline.ids() == [checkpoint_id]
    # Both are offline: the folder has what is beside the weights of the later one.
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "colder")
    with pytest.raises(MergePipeError, match=r"place .* is taken"):
        unpack(warehouse, "e0@1")
    unpack(warehouse, "e0@2")
    assert files_in(tmp_path / "e0") == now
    assert warehouse.offline.ids() == [checkpoint_id]


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


@pytest.mark.parametrize("what", ["index", "chunks"])
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
    assert f"copy the files of {tmp_path / 'cold' / 'e0'} to " in told
    assert "delete" not in told
    assert "bytes -" not in told


_KILLED = """
import os, signal, sys
from mergepipe_pipeline.verbs import replace
from mergepipe_pipeline.warehouse import Warehouse
replace.adopt_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
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


def test_gc_keeps_the_pack_of_an_expert_whose_old_folder_has_a_new_version(tmp_path: Path) -> None:
    warehouse, before, checkpoint_id = moved_twice(tmp_path)
    expert = warehouse.offline.find(checkpoint_id)
    assert expert is not None
    collect(warehouse, older_than_s=0)
    assert warehouse.packs.path(expert.pack_id).is_dir()
    assert files_in(tmp_path / "cold" / "e0") == weights(before)


def test_two_experts_of_one_name_in_cold_storage_lose_neither(tmp_path: Path) -> None:
    warehouse, before = with_side_files(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    there = tmp_path / "cold" / "e0" / "e0.safetensors"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"of another")
    with pytest.raises(MergePipeError, match="place for an expert's files is taken"):
        move_to_cold(warehouse, made, tmp_path / "cold")
    assert files_in(tmp_path / "e0") == before
    assert there.read_bytes() == b"of another"
    assert warehouse.offline.ids() == []


def test_nothing_is_unpacked_over_what_came_there_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse, _ = with_side_files(tmp_path)
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")

    def another_is_faster(*given: Any) -> None:
        write_weights(*given)
        (tmp_path / "e0" / "e0.safetensors").write_bytes(b"another")

    monkeypatch.setattr(module, "write_weights", another_is_faster)
    with pytest.raises(MergePipeError, match="place for an expert's files is taken"):
        unpack(warehouse, "e0")
    assert (tmp_path / "e0" / "e0.safetensors").read_bytes() == b"another"
    assert warehouse.offline.ids()


@pytest.mark.parametrize("what", ["another name", "the warehouse"])
def test_weights_that_others_read_do_not_move(tmp_path: Path, what: str) -> None:
    warehouse = warehouse_of(tmp_path)
    root = tmp_path / "e0"
    if what == "another name":
        (root / "inside").mkdir()
        (root / "e0.safetensors").rename(root / "inside" / "e0.safetensors")
        names = [*base_tensors(), "model.own.weight"]
        index = {"weight_map": dict.fromkeys(names, "inside/e0.safetensors")}
        (root / "model.safetensors.index.json").write_text(json.dumps(index))
        register(warehouse, root / "inside", "other", "base")
    else:
        shutil.move(root, warehouse.root / "kept")
        root = warehouse.root / "kept"
    register(warehouse, root, "e0", "base")
    (made,) = pack(warehouse, ["e0"])
    before = files_in(root)
    with pytest.raises(MergePipeError, match="cannot be moved away"):
        move_to_cold(warehouse, made, tmp_path / "cold")
    assert files_in(root) == before


def test_a_single_file_below_which_a_folder_is_replaced_is_read_by_a_later_version_alone(
    tmp_path: Path,
) -> None:
    warehouse, _ = with_side_files(tmp_path)
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")
    write(tmp_path / "e0", "model", expert_tensors(base_tensors(), 7))  # of another name
    assert not locate_registered(warehouse, "e0").checkpoint.is_offline
    assert warehouse.catalog.get("e0").version == 2
