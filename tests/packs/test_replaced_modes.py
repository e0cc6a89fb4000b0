"""Empty folders and permission bits of an expert come back from cold storage with its files."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.replaced import RECORD, MovedFile, MovedFolder, Replaced
from mergepipe_pipeline.packs.travelling import from_bytes, to_bytes
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.storage.permissions import give_permissions, make_removable, permissions_of
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.replace import move_to_cold, unpack
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.test_replace import files_in, with_side_files


def modes_in(folder: Path) -> dict[str, int]:
    """Path to mode of all files and folders, the folder itself as well."""
    paths = (folder, *folder.rglob("*"))
    return {str(p.relative_to(folder)): stat.S_IMODE(p.lstat().st_mode) for p in paths}


def with_modes(tmp: Path) -> tuple[Warehouse, dict[str, int]]:
    """A warehouse whose expert has empty folders and permission bits of its own."""
    warehouse, _ = with_side_files(tmp)
    root = tmp / "e0"
    (root / "logs" / "old").mkdir(parents=True)
    for path, mode in {
        "config.json": 0o600,
        "notes/read.me": 0o755,
        "empty": 0o444,
        "notes": 0o500,
        "logs/old": 0o711,
        "logs": 0o555,
        ".": 0o750,
    }.items():
        (root / path).chmod(mode)
    return warehouse, modes_in(root)


@pytest.mark.parametrize("is_copied", [False, True])
def test_empty_folders_and_permission_bits_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    warehouse, modes = with_modes(tmp_path)
    files = files_in(tmp_path / "e0")

    def refuse(step: str) -> None:
        if step == "rename":
            monkeypatch.setattr(atomic, "crash_hook", None)
            raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(atomic, "crash_hook", refuse if is_copied else None)
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")
    monkeypatch.setattr(atomic, "crash_hook", None)
    assert not (tmp_path / "e0").exists()
    assert modes_in(tmp_path / "cold" / "e0") == modes
    unpack(warehouse, "e0", tmp_path / "elsewhere")
    unpack(warehouse, "e0")
    for place in ("elsewhere", "e0"):
        assert modes_in(tmp_path / place) == modes
        assert files_in(tmp_path / place) == files
    assert warehouse.replaced.ids() == []


def test_bits_that_lend_rights_do_not_come_back(tmp_path: Path) -> None:
    warehouse, _ = with_side_files(tmp_path)
    (tmp_path / "e0" / "config.json").chmod(0o6755)
    (tmp_path / "e0" / "notes").chmod(0o3777)
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")
    unpack(warehouse, "e0")
    modes = modes_in(tmp_path / "e0")
    assert (modes["config.json"], modes["notes"]) == (0o755, 0o777)


def test_a_record_of_an_earlier_release_gives_the_files_without_modes(tmp_path: Path) -> None:
    warehouse, modes = with_modes(tmp_path)
    files = files_in(tmp_path / "e0")
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")
    (path,) = warehouse.replaced_dir.glob(f"*/{RECORD}")
    value = unseal(path.read_bytes(), str(path))
    del value["folders"]
    for file in value["files"]:
        del file["mode"]
    path.write_bytes(seal(value))
    unpack(warehouse, "e0")
    assert files_in(tmp_path / "e0") == files
    found = modes_in(tmp_path / "e0")
    assert "logs" not in found
    assert found["config.json"] != modes["config.json"]


def test_what_fails_while_it_is_unpacked_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse, _ = with_modes(tmp_path)
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")
    before = sorted(p.name for p in tmp_path.iterdir())

    def fail(step: str) -> None:
        if step == "publish":
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(atomic, "crash_hook", fail)
    with pytest.raises(OSError, match="Input/output"):
        unpack(warehouse, "e0")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_link_is_never_followed_to_what_it_means(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "folder" / "link"
    target.touch(0o640)
    link.parent.mkdir()
    link.symlink_to(target)
    assert permissions_of(link) is None
    with pytest.raises(OSError, match="symbolic"):
        give_permissions(link, 0o777)
    make_removable(link.parent)
    assert permissions_of(target) == 0o640


@pytest.mark.parametrize("path", ["../../other", "/etc/other", "a/../../other"])
@pytest.mark.parametrize("of", ["file", "folder", "name", "pack"])
def test_a_pack_from_elsewhere_names_no_place_outside_of_its_expert(path: str, of: str) -> None:
    file = MovedFile(path if of == "file" else "config.json", 1, 1, "0" * 64, ())
    folder = MovedFolder(path if of == "folder" else ".", 0o755)
    name, pack_id = path if of == "name" else "e0", path if of == "pack" else "1" * 64
    record = Replaced("2" * 24, name, "", "", "base", pack_id, (file,), (folder,))
    with pytest.raises(CorruptionError, match="another form than this version writes"):
        from_bytes(to_bytes(record, ()), "there")
