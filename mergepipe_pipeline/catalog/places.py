"""At which places files are known to be what a checkpoint's digests say.

A place is, of every file: its path, its inode, the time of its last change that nobody can set
(ctime), and its file system. Of that the id that `statvfs` tells, which comes from the volume: the
number in `stat` is that of a mount, another one on another host and, of NFS, overlays and btrfs,
after each. Where a file system tells none (0, as NFS), the other three decide. A link of the hub's
cache stands for its blob, so that revisions share what they share. The files of a snapshot here
are shared with other snapshots, whose links change ctime: its own folder is its place, named by
what was merged.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mergepipe_pipeline.catalog.formats import PLACES
from mergepipe_pipeline.digest import digest_json, seal, unseal
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import READ_ONLY, create_exclusive, write_atomic
from mergepipe_pipeline.storage.roots import Roots

_FIRST = "first.json"
#: The records that a warehouse which may only be read could not take.
_UNWRITTEN = set[Path]()


class First(NamedTuple):
    """The place at which something was learned of a checkpoint first, and its folder."""

    place: str
    root: str


def read_place(path: Path) -> First:
    """Read a record of a place. Raises CorruptionError if it is not what was written there."""
    value = unseal(path.read_bytes(), str(path))
    named = {"checkpoint_id": path.parent.name}
    if path.name != _FIRST:
        named["place"] = path.stem
    for key, name in named.items():
        if value.get(key) != name:
            raise CorruptionError(
                "A record of a place is not that of its name",
                where=str(path),
                expected=f"{key} {name}",
                found=str(value.get(key)),
                next_step="delete the file; the inputs are read once more where they are needed",
            )
    return First(str(value["place"]), str(value["root"]))


@dataclass(frozen=True)
class PlaceFiles:
    """The places of one checkpoint's id. Each is a file, there or not; nothing is changed in one.

    The first one is claimed before anything is learned there, so that of two models with one id
    that are analysed at the same time the second one knows whom to be compared with. `snapshots`
    is the folder of the warehouse's own results.
    """

    catalog: Path
    roots: Roots
    snapshots: Path
    checkpoint_id: str

    def __contains__(self, place: str) -> bool:
        path = self._path(place)
        return path.exists() or path in _UNWRITTEN

    def place_of(self, checkpoint: Checkpoint) -> str | None:
        """32 hexadecimal characters that tell where a checkpoint's files lie, and in which state.

        None for what has no place: files at an address, or other ones than the checkpoint's.
        """
        if "://" in checkpoint.root:
            return None
        root, recorded = Path(checkpoint.root), self.roots.recorded
        folder, is_file = recorded(checkpoint.root), root.is_file()
        is_own = root.parent == self.snapshots
        systems: dict[int, int] = {}
        files: list[tuple[str, int, int, int]] = []
        for entry in checkpoint.files:
            path = root if is_file else root / entry.path
            try:
                stat = path.stat()
                if stat.st_dev not in systems:
                    systems[stat.st_dev] = os.statvfs(path).f_fsid
                is_link = path.is_symlink()
            except OSError:
                return None
            if (stat.st_size, stat.st_mtime_ns) != (entry.nbytes, entry.mtime_ns):
                return None
            name = recorded(os.path.realpath(path)) if is_link else f"{folder}/{entry.path}"
            changed_ns = 0 if is_own else stat.st_ctime_ns
            files.append((name, stat.st_ino, changed_ns, systems[stat.st_dev]))
        return digest_json(files)[:32]

    def claim(self, place: str, root: str) -> bool:
        """Make this the first place; False if another one is."""
        try:
            with suppress(FileExistsError):
                create_exclusive(self._folder / _FIRST, self._record(place, root))
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            return not (self._folder / _FIRST).exists()
        first = self.first()
        if first is None or first.place != place:
            return False
        self.add(place, root)
        return True

    def add(self, place: str, root: str) -> None:
        """Remember that the files at a place agree with what is known."""
        try:
            write_atomic(self._path(place), self._record(place, root))
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            _UNWRITTEN.add(self._path(place))

    def first(self) -> First | None:
        """The first place; None if there is none, or its record is damaged."""
        with suppress(FileNotFoundError, CorruptionError):
            first = read_place(self._folder / _FIRST)
            return First(first.place, self.roots.here(first.root))
        return None

    def _record(self, place: str, root: str) -> bytes:
        root = self.roots.recorded(root)
        return seal({"checkpoint_id": self.checkpoint_id, "place": place, "root": root})

    @property
    def _folder(self) -> Path:
        return self.catalog / PLACES / self.checkpoint_id

    def _path(self, place: str) -> Path:
        return self._folder / f"{place}.json"
