"""`pack --replace` moves an expert's own files, to a place of their own, or nothing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.packs.index import frames_path
from mergepipe_pipeline.storage.atomic import publish_dir, remove_tree, rename
from mergepipe_pipeline.verbs import replace as module
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold, unpack
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.models import base_tensors, warehouse_of
from tests.packs.test_replace import files_in
from tests.packs.test_upkeep import flip
from tests.support.stored import write


def across_file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders cannot be renamed to cold storage."""

    def refused(source: str | Path, target: Path) -> Path:
        if Path(source).parent == target.parent:
            return rename(source, target)
        raise OSError(errno.EXDEV, "cross-device", str(source))

    monkeypatch.setattr(module, "rename", refused)


def test_gc_keeps_the_pack_of_an_expert_whose_old_folder_has_a_new_version(tmp_path: Path) -> None:
    warehouse = warehouse_of(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    before = files_in(tmp_path / "e0")
    move_to_cold(warehouse, made, tmp_path / "cold")
    (tmp_path / "e0").mkdir()
    write(tmp_path / "e0", "e0", base_tensors())
    assert register(warehouse, tmp_path / "e0", "e0", "base").version == 2
    collect(warehouse, older_than_s=0)
    assert warehouse.packs.path(made.pack_id).is_dir()
    assert files_in(tmp_path / "cold" / "e0") == before


def test_two_that_go_to_one_place_at_once_lose_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse = warehouse_of(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    before = files_in(tmp_path / "e0")

    def another_is_faster(staged: Path, final: Path) -> bool:
        final.mkdir(parents=True)
        (final / "model.safetensors").write_bytes(b"of another")
        return publish_dir(staged, final)

    across_file_systems(monkeypatch)
    monkeypatch.setattr(module, "publish_dir", another_is_faster)
    with pytest.raises(MergePipeError, match="place for an expert's files is taken"):
        move_to_cold(warehouse, made, tmp_path / "cold")
    assert files_in(tmp_path / "e0") == before
    assert warehouse.replaced.ids() == []


def test_nothing_is_unpacked_over_what_came_there_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse = warehouse_of(tmp_path)
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")

    def another_is_faster(staged: Path, final: Path) -> bool:
        final.mkdir()
        (final / "notes").touch()
        return publish_dir(staged, final)

    monkeypatch.setattr(module, "publish_dir", another_is_faster)
    with pytest.raises(MergePipeError, match="place for an expert's files is taken"):
        unpack(warehouse, "e0")
    assert [*files_in(tmp_path / "e0")] == ["notes"]
    assert warehouse.replaced.ids()


@pytest.mark.parametrize("what", ["another expert", "the base", "the warehouse"])
def test_other_checkpoints_and_the_warehouse_do_not_move_with_an_expert(
    tmp_path: Path, what: str
) -> None:
    warehouse = warehouse_of(tmp_path)
    inside = tmp_path / "e0" / "inside"
    if what == "the warehouse":
        shutil.copytree(warehouse.root, inside)
        warehouse = Warehouse.at(inside)
    elif what == "the base":
        shutil.copytree(tmp_path / "base", inside)
        register(warehouse, inside, "base")
    else:
        shutil.copytree(tmp_path / "base", inside)
        register(warehouse, inside, "checkpoint-500", "base")
    (made,) = pack(warehouse, ["e0"])
    before = files_in(tmp_path / "e0")
    with pytest.raises(MergePipeError, match="cannot be moved away") as refused:
        move_to_cold(warehouse, made, tmp_path / "cold")
    assert str(inside) in str(refused.value)
    assert files_in(tmp_path / "e0").keys() == before.keys()
    assert not (tmp_path / "cold").exists()


def test_a_folder_that_cannot_be_removed_whole_is_not_reported_as_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse = warehouse_of(tmp_path)
    (made,) = pack(warehouse, ["e0"])

    def something_stays(path: Path) -> None:
        remove_tree(path)
        if ".moved" in path.parent.name:
            (path.parent / ".nfs0001").touch()

    across_file_systems(monkeypatch)
    monkeypatch.setattr(module, "remove_tree", something_stays)
    with pytest.raises(MergePipeError, match="came into an expert's folder") as told:
        move_to_cold(warehouse, made, tmp_path / "cold")
    assert ".nfs0001" in str(told.value)
    assert str(tmp_path / "cold" / "e0") in str(told.value)
    assert [*files_in(tmp_path / "e0")] == [".nfs0001"]
    shutil.rmtree(tmp_path / "e0")
    assert move_to_cold(warehouse, made, tmp_path / "cold").before


def test_a_move_that_fails_leaves_no_record(tmp_path: Path) -> None:
    warehouse = warehouse_of(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    flip(frames_path(warehouse.packs.path(made.pack_id), "X"))
    with pytest.raises(CorruptionError):
        move_to_cold(warehouse, made, tmp_path / "cold")
    assert warehouse.replaced.ids() == []
    assert os.listdir(tmp_path / "e0")
