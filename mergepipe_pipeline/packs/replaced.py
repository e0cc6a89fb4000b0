"""What the warehouse keeps of an expert whose files were moved away, beside its pack.

A folder named by the checkpoint's id: a sealed record of files and folders, and of each file the
bytes that are no packed tensor, one after the other (its rest). With pack and base they give every
file again, bit for bit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mergepipe_pipeline.digest import seal
from mergepipe_pipeline.domain.checkpoint import AWAY, Checkpoint
from mergepipe_pipeline.errors import CheckpointError, CorruptionError
from mergepipe_pipeline.storage.atomic import make_dirs, remove_tree, rename, write_atomic
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.permissions import permissions_of
from mergepipe_pipeline.storage.roots import Roots
from mergepipe_pipeline.storage.source import LocalSource

#: The file that describes the others beside it.
RECORD = "record.json"
_PIECE_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class MovedFile:
    """A file by its path in the checkpoint; `tensors` are (name, first byte, bytes) in the pack.

    `rest_sha256` is of the bytes that stay beside the pack, "" before they are written. `mode` are
    its permission bits; None: it was a link, or an earlier release moved it, which kept none.
    """

    path: str
    nbytes: int
    mtime_ns: int
    sha256: str
    tensors: tuple[tuple[str, int, int], ...]
    rest_sha256: str = ""
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class MovedFolder:
    """A folder by its path in the checkpoint, whose own is ".", with its permission bits."""

    path: str
    mode: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """An expert whose original was moved from `root` to `cold`; `base` is a registered name.

    Without `folders` an earlier release moved it, which recorded no empty folders.
    """

    checkpoint_id: str
    name: str
    root: str
    cold: str
    base: str
    pack_id: str
    files: tuple[MovedFile, ...]
    folders: tuple[MovedFolder, ...] = ()

    @property
    def bring_back(self) -> str:
        """What to do where pack, base and rests do not give the files again."""
        if self.is_away:
            return f"bring the original back: copy {self.cold} to {self.root}"
        return f"use the original, which is in {self.cold}: its old place {self.root} is taken"

    @property
    def is_away(self) -> bool:
        """Whether nothing is where the original was."""
        return not Path(self.root).exists()

    @property
    def is_back(self) -> bool:
        """Whether the original is where it was, by sizes and times, and not a later version."""
        for file in self.files:
            try:
                stat = (Path(self.root) / file.path).stat()
            except OSError:
                return False
            if (stat.st_size, stat.st_mtime_ns) != (file.nbytes, file.mtime_ns):
                return False
        return True


class ReplacedStore:
    """The folder `replaced` of a warehouse."""

    def __init__(self, folder: Path, roots: Roots) -> None:
        self._folder, self._roots = folder, roots

    def path(self, checkpoint_id: str) -> Path:
        """The folder that a checkpoint's record and rests are, or would be, in."""
        return self._folder / checkpoint_id

    def address(self, checkpoint_id: str) -> str:
        """The root under which the files of a moved checkpoint are read."""
        return f"{AWAY}{self.path(checkpoint_id)}"

    def ids(self) -> list[str]:
        """The ids of checkpoints that were replaced; sorted."""
        paths = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted(p.name for p in paths if not p.name.startswith("."))

    def find(self, checkpoint_id: str) -> Replaced | None:
        """The record of a checkpoint; None if it was not replaced. Raises CorruptionError."""
        path, here, data = self.path(checkpoint_id) / RECORD, self._roots.here, b""
        try:
            data = path.read_bytes()
            # It loads pydantic, which commands that only list refs start without.
            from mergepipe_pipeline.packs.record_form import checked_record

            record = record_of(checked_record(data, str(path)))
        except (FileNotFoundError, IsADirectoryError):
            if not path.parent.is_dir():
                return None
            if path.is_file():  # `pack --replace` has put it there since
                return self.find(checkpoint_id)
            raise CorruptionError(
                "The record of an expert that was moved away is missing",
                where=str(path),
                expected="what `mergepipe pack --replace` wrote there",
                found="a folder" if path.is_dir() else "no such file",
                next_step=_without_record(path.parent, "", ""),
            ) from None
        except CorruptionError as error:
            cold, root = _text_in(data, "cold"), _text_in(data, "root")
            error.next_step = _without_record(path.parent, here(cold), here(root))
            raise
        return replace(record, root=here(record.root), cold=here(record.cold))

    def forget(self, checkpoint_id: str) -> None:
        """Remove a checkpoint's folder: by one rename first, so that nobody sees a part of it."""
        path = self.path(checkpoint_id)
        gone = path.with_name(f".{checkpoint_id}.old-gone")
        remove_tree(gone)
        remove_tree(rename(path, gone))

    def roots_away(self) -> frozenset[str]:
        """The old places of originals that are away. Raises CorruptionError as `find`."""
        records = map(self.find, self.ids())
        return frozenset(r.root for r in records if r is not None and r.is_away)

    def rest(self, checkpoint_id: str, number: int) -> Path:
        """The bytes of file `number` of a record that are in no pack."""
        return _rest(self.path(checkpoint_id), number)

    def refuse_damaged_rest(self, record: Replaced) -> None:
        """Raise CorruptionError naming the first rest that is not what was written; reads all.

        Raises CheckpointError if nothing is left of the record: the files came back meanwhile.
        """
        for number, file in enumerate(record.files):
            path = self.rest(record.checkpoint_id, number)
            sha256 = file_sha256(path) if path.is_file() else "no file"
            if file.rest_sha256 not in ("", sha256):
                if not self.path(record.checkpoint_id).exists():
                    raise came_back(self.path(record.checkpoint_id))
                raise CorruptionError(
                    "What gives an expert's file back was changed after it was written",
                    where=f"{path}, for {file.path} of {record.name}",
                    expected=f"sha256 {file.rest_sha256[:16]}",
                    found=sha256 if sha256 == "no file" else f"sha256 {sha256[:16]}",
                    next_step=record.bring_back,
                )


def came_back(folder: Path) -> CheckpointError:
    """The error that a record is gone with all that lay beside it in its folder."""
    return CheckpointError(
        "Nothing gives the files of a checkpoint that was moved away",
        where=str(folder),
        expected="what `pack --replace` left of them",
        found="nothing: they came back meanwhile, or somebody removed it",
        next_step="run the same command again",
    )


@contextmanager
def original_named(record: Replaced, pack: Path) -> Iterator[None]:
    """Add to an error about the pack's files where the original is: nothing else helps as much."""
    try:
        yield
    except CorruptionError as error:
        if str(pack) in (error.where or ""):
            error.next_step = (
                f"{record.bring_back}; then run `mergepipe repair` and `mergepipe pack "
                f"{record.name}`"
            )
        raise


def files_of(
    root: Path,
    checkpoint: Checkpoint,
    packed: Mapping[str, str],
    names: Iterable[str] | None = None,
) -> tuple[MovedFile, ...]:
    """Files of a checkpoint's folder, hashed, with the places of packed tensors.

    Args:
        root: the folder.
        checkpoint: what it holds.
        packed: the pack's name of each tensor of the checkpoint.
        names: the files, by default all below the folder.

    Raises CheckpointError for what is no regular file, or a link that leaves the folder.
    """
    if names is None:
        paths = sorted(p for p in root.rglob("*") if p.is_symlink() or not p.is_dir())
        names = [str(p.relative_to(root)) for p in paths]
    files = []
    with LocalSource(root, "exact") as source:
        for name in sorted(names):
            places = sorted(
                (t.start_byte, packed[t.name], t.nbytes)
                for t in checkpoint.tensors
                if t.file == name and t.name in packed
            )
            tensors = tuple((tensor, start, nbytes) for start, tensor, nbytes in places)
            with source.lent(name) as (descriptor, _):
                stat = os.fstat(descriptor)
                sha256 = file_sha256(Path(f"/proc/self/fd/{descriptor}"))
            mode = permissions_of(root / name)
            files.append(
                MovedFile(name, stat.st_size, stat.st_mtime_ns, sha256, tensors, mode=mode)
            )
    return tuple(files)


def folders_of(root: Path) -> tuple[MovedFolder, ...]:
    """The folder of a checkpoint and all below it, empty ones too; those above come first."""
    folders = sorted(p for p in (root, *root.rglob("*")) if p.is_dir() and not p.is_symlink())
    modes = ((p.relative_to(root).as_posix(), permissions_of(p)) for p in folders)
    return tuple(MovedFolder(path, mode) for path, mode in modes if mode is not None)


def write_record(staged: Path, record: Replaced, roots: Roots) -> Replaced:
    """Write an expert's record and rests into a folder; returns the record as written.

    Raises StorageFullError.
    """
    make_dirs(staged)
    files = []
    with LocalSource(record.root, "exact") as source:
        for number, file in enumerate(record.files):
            write_atomic(_rest(staged, number), _without_tensors(source, file))
            files.append(replace(file, rest_sha256=file_sha256(_rest(staged, number))))
    written = replace(record, files=tuple(files))
    put_record(staged, written, roots)
    return written


def put_record(staged: Path, record: Replaced, roots: Roots) -> None:
    """Write the record alone, beside the rests. Raises StorageFullError."""
    root, cold = roots.recorded(record.root), roots.recorded(record.cold)
    write_atomic(staged / RECORD, seal(asdict(replace(record, root=root, cold=cold))))


def record_of(value: Mapping[str, Any]) -> Replaced:
    """The record of a value that has the form of one."""
    files = tuple(MovedFile(**file) for file in value["files"])
    folders = tuple(MovedFolder(**folder) for folder in value["folders"])
    return Replaced(**{**value, "files": files, "folders": folders})


def restored(
    file: MovedFile, rest: Path, tensor: Callable[[str], Iterator[memoryview]]
) -> Iterator[bytes | memoryview]:
    """The bytes of a file again, a piece at a time; `tensor` gives those of a packed tensor.

    Raises CorruptionError if there are fewer than there were.
    """
    with rest.open("rb") as kept:
        at = 0
        for name, start, nbytes in (*file.tensors, ("", file.nbytes, 0)):
            yield from _read(kept.read, start - at, rest)
            if name:
                yield from tensor(name)
            at = start + nbytes


def _without_tensors(source: LocalSource, file: MovedFile) -> Iterator[bytes]:
    at = 0
    for _, start, nbytes in (*file.tensors, ("", file.nbytes, 0)):
        for first in range(at, start, _PIECE_NBYTES):
            yield source.read_range(file.path, first, min(_PIECE_NBYTES, start - first))
        at = start + nbytes


def _read(read: Callable[[int], bytes], nbytes: int, path: Path) -> Iterator[bytes]:
    """So many bytes of an open file, a piece at a time."""
    while nbytes > 0:
        piece = read(min(nbytes, _PIECE_NBYTES))
        if not piece:
            raise CorruptionError(
                "A file ended while it was read", where=str(path), found=f"{nbytes} bytes less"
            )
        nbytes -= len(piece)
        yield piece


def _text_in(data: bytes, key: str) -> str:
    """The text under a key of a damaged record, as far as it can be read; "" if it cannot."""
    match = re.search(rf'"{key}": "([^"]+)"', data.decode(errors="replace"))
    return match[1] if match else ""


def _without_record(folder: Path, cold: str, root: str) -> str:
    """What to do where the record in a folder cannot be read."""
    return (
        "restore the file from a copy of the warehouse, and do not remove it: without it the pack "
        f"gives nothing back; if there is no copy, copy {cold or 'the original in cold storage'} "
        f"to {root or 'where it was'}, with its times (`cp -a`), and only then remove {folder}"
    )


def _rest(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.rest"
