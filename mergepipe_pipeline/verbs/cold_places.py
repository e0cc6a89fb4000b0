"""From where and to where the files of an expert may be moved: what `pack --replace` refuses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.packs.replaced import MovedFile, Replaced
from mergepipe_pipeline.resolution.locate import locate_registered
from mergepipe_pipeline.storage.atomic import rename
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.text import listed
from mergepipe_pipeline.verbs.pack import Packed
from mergepipe_pipeline.warehouse import Warehouse

#: Files that an error names.
_MOST_NAMED = 5


def refuse_away(warehouse: Warehouse, packed: Packed) -> None:
    """Refuse an expert that is away, or whose base is: two could stand for each other."""
    for name in (packed.name, packed.base):
        if locate_registered(warehouse, name).checkpoint.is_away:
            raise MergePipeError(
                "An expert's files cannot be moved away",
                where=packed.name,
                expected=f"the files of {name}",
                found="none: they were moved away before, for another pack",
                next_step=f"run `mergepipe unpack {name}` first",
            )


def refuse_wrong_places(packed: Packed, root: Path, target: Path) -> None:
    """Refuse what is no folder of plain files, or has no room where it is to go."""
    odd = [p for p in (root, *root.rglob("*")) if p.is_symlink() or not (p.is_dir() or p.is_file())]
    if "X" not in packed.tier_nbytes:
        expected, found = "a pack with tier X", f"one of {', '.join(packed.tier_nbytes)}"
        next_step = f"run `mergepipe pack {packed.name}` without --tiers"
    elif root.is_mount():
        expected, found = "a folder that can be moved", "a file system that is mounted there"
        next_step = "copy the files into a folder, and register that under the same name"
    elif not root.is_dir() or odd:
        expected, found = "a folder of plain files", f"{odd[0] if odd else root}, no plain file"
        next_step = "copy the files into a folder, and register that under the same name"
    elif os.path.lexists(target) and (target.is_symlink() or not target.is_dir()):
        expected, found = f"room for a folder at {target}", "something else there"
        next_step = "choose another --cold"
    elif target.is_relative_to(root):
        expected, found = "a --cold outside of the expert's folder", str(target)
        next_step = "choose another --cold"
    else:
        return
    raise MergePipeError(
        "An expert's files cannot be moved away",
        where=f"{packed.name}, {root}",
        expected=expected,
        found=found,
        next_step=next_step,
    )


def refuse_others_inside(warehouse: Warehouse, name: str, root: Path) -> None:
    """Refuse to move what is not the expert's with it: other checkpoints, or the warehouse."""
    catalog = warehouse.catalog
    others = {other: Path(catalog.root(other)) for other in catalog.names()}
    inside = {n: p for n, p in others.items() if p != root and p.is_relative_to(root)}
    if warehouse.root.is_relative_to(root):
        inside["the warehouse"] = warehouse.root
    if not inside and not root.is_relative_to(warehouse.snapshots):
        return
    found = ", ".join(f"{n} at {p}" for n, p in sorted(inside.items()))
    raise MergePipeError(
        "An expert's files cannot be moved away",
        where=f"{name}, {root}",
        expected="a folder of this expert alone",
        found=found or "a snapshot of the warehouse",
        next_step="copy its files into a folder of their own, and register that under this name",
    )


def taken(target: Path, option: str) -> MergePipeError:
    """The error that something lies where an expert's files are to go."""
    return MergePipeError(
        "The place for an expert's files is taken",
        where=str(target),
        expected="no such folder yet",
        found="one",
        next_step=f"give another place with {option}",
    )


def refuse_other_files(record: Replaced) -> None:
    """Raise MergePipeError unless `cold` holds a copy of the files of a record, and no others.

    Links to the expert's files, or another path to them, are no copy: they go with the files.
    """
    root, target = Path(record.root), Path(record.cold)
    expected = {file.path: file.sha256 for file in record.files}
    paths = [p for p in target.rglob("*") if p.is_symlink() or not p.is_dir()]
    copied = {p.relative_to(target).as_posix() for p in paths}
    if any(p.is_symlink() or not p.is_file() for p in paths):
        problem = "links or special files"
    elif copied != expected.keys():
        problem = "other files"
    elif any((target / path).samefile(root / path) for path in expected):
        problem = "the expert's own files under another path"
    elif any(file_sha256(target / path) != sha256 for path, sha256 in expected.items()):
        problem = "other files"
    else:
        return
    raise MergePipeError(
        "The place for an expert's files is taken",
        where=str(target),
        expected=f"nothing, or a copy of the files of {record.name} and no others",
        found=problem,
        next_step="choose another --cold",
    )


def is_recorded(file: MovedFile, path: Path) -> bool:
    """Whether a path holds what a record says of a file, by all of its bytes."""
    return _is_alike(file, path) and file_sha256(path) == file.sha256


def unrecorded(record: Replaced, folder: Path) -> list[str]:
    """What is in a renamed folder of an expert and not in its record, by sizes and times."""
    files = {file.path: file for file in record.files}
    known = {inner.path for inner in record.folders}
    names = ((path, path.relative_to(folder).as_posix()) for path in sorted(folder.rglob("*")))
    return [
        name
        for path, name in names
        if name not in known and not (name in files and _is_alike(files[name], path))
    ]


def refuse_unrecorded(record: Replaced, folder: Path, found: Sequence[str]) -> None:
    """Raise MergePipeError if anything was `found` in a renamed folder of an expert.

    The folder gets its place again first, unless that is taken.
    """
    if not found:
        return
    place = folder if os.path.lexists(record.root) else rename(folder, record.root)
    if all((place / file.path).is_file() for file in record.files):
        then = "then run the same command again"
    else:
        then = f"then remove the folder: the expert is read from its pack, its files: {record.cold}"
    raise MergePipeError(
        "Something came into an expert's folder while it was moved away",
        where=str(place),
        expected=f"the files of {record.name} as they were packed, and nothing else",
        found=listed(found, _MOST_NAMED),
        next_step=f"nothing of it is removed: move it elsewhere when nobody writes there, {then}",
    )


def _is_alike(file: MovedFile, path: Path) -> bool:
    """Whether a path is a file with the size and time of a recorded one."""
    if path.is_symlink() or not path.is_file():
        return False
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns) == (file.nbytes, file.mtime_ns)
