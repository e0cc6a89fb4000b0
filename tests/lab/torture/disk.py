"""What a loss of power would leave: a disk that keeps only what was made durable.

The model is the strict one of POSIX: bytes of a file are safe by fsync of the file, names by fsync
of their folder. Of what is not safe, chance decides.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

#: A file or folder; inode numbers are not used again while the file is held open.
Inode = int

_open, _read_bytes = os.open, Path.read_bytes
_mkdir, _link = os.mkdir, os.link


class Disk:
    """Follows one folder, whose content at the start is durable."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[Inode, dict[str, Inode]] = {}
        self._bytes: dict[Inode, bytes] = {}
        self._held: dict[Inode, int] = {}
        for folder, _, files in os.walk(root):
            for name in files:
                self.sync(os.path.join(folder, name))
            self.sync(folder)

    def _hold(self, path: str) -> None:
        """Keep the number of a file from being given to another one."""
        number = os.lstat(path).st_ino
        if number not in self._held:
            self._held[number] = _open(path, os.O_PATH | os.O_NOFOLLOW)

    def sync(self, path: str) -> None:
        """A file's bytes, or a folder's names, are safe as they are."""
        if path.endswith(" (deleted)"):
            return
        self._hold(path)
        number = os.lstat(path).st_ino
        if os.path.isdir(path):
            self._names[number] = {e.name: e.inode() for e in os.scandir(path)}
            for entry in os.scandir(path):
                self._hold(entry.path)
        else:
            self._bytes[number] = _read_bytes(Path(path))

    def dump(self, target: Path, seed: int) -> None:
        """Write what is left to a new folder `target`.

        Names that are not safe: all are lost, all stay, or a coin for each folder decides. Bytes
        that are not safe are lost, or the file is as long as it was and full of zeros.
        """
        chance = Random(seed)
        likely = chance.choice([0.0, 0.5, 1.0])
        now = {os.lstat(f).st_ino: f for f, _, _ in os.walk(self._root)}
        sizes = {
            os.lstat(path).st_ino: os.lstat(path).st_size
            for folder, _, files in os.walk(self._root)
            for path in (os.path.join(folder, name) for name in files)
        }
        written: dict[Inode, Path] = {}

        def put(number: Inode, path: Path) -> None:
            is_folder = number in now or number in self._names
            if is_folder:
                _mkdir(path)
                safe = self._names.get(number, {})
                there = number in now and chance.random() < likely
                names = {e.name: e.inode() for e in os.scandir(now[number])} if there else safe
                for name, inner in sorted(names.items()):
                    put(inner, path / name)
            elif number in written:
                _link(written[number], path)
            else:
                lost = b"" if chance.random() < 0.5 else bytes(sizes.get(number, 0))
                with open(path, "wb") as file:
                    file.write(self._bytes.get(number, lost))
                written[number] = path

        put(os.lstat(self._root).st_ino, target)
