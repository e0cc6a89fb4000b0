"""The record of an expert whose weight files a pack stands for, and what lies beside the pack.

A folder named by the checkpoint's id: a sealed record, and of each weight file the bytes that are
no packed tensor, its header among them (its leftovers). With pack and base they give every weight
file again, bit for bit. Config, tokenizer and all else stay in the expert's folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mergepipe_pipeline.checkpoints.dcp import METADATA
from mergepipe_pipeline.digest import seal
from mergepipe_pipeline.domain.bounds import (
    CheckpointId,
    PathBelow,
    Registered,
    Sha256,
    Size,
    Text,
    Time,
)
from mergepipe_pipeline.domain.checkpoint import PACKED, Checkpoint
from mergepipe_pipeline.errors import (
    CheckpointError,
    CorruptionError,
    DamagedPackError,
    MergePipeError,
)
from mergepipe_pipeline.storage.atomic import make_dirs, remove_tree, rename, write_atomic
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.roots import UNMOUNTED, Roots
from mergepipe_pipeline.storage.source import LocalSource

#: The file that describes the others beside it.
RECORD = "record.json"
_PIECE_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A weight file by its path in the checkpoint; `tensors` are (name, first byte, bytes) in the
    pack, by its names. `leftover_sha256` is of the bytes that stay beside the pack.
    """

    path: PathBelow
    nbytes: Size
    mtime_ns: Time
    sha256: Sha256
    tensors: tuple[tuple[Text, Size, Size], ...]
    leftover_sha256: Sha256

    def is_at(self, path: Path) -> bool:
        """Whether a path is a file, and no link, with this size and time."""
        if path.is_symlink() or not path.is_file():
            return False
        stat = path.stat()
        return (stat.st_size, stat.st_mtime_ns) == (self.nbytes, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class OfflineExpert:
    """An expert in the folder `root` whose weight files moved to `cold`, a folder or an address.

    `base` is a registered name.
    """

    checkpoint_id: CheckpointId
    name: Registered
    root: Text
    cold: Text
    base: Registered
    pack_id: Sha256
    files: tuple[WeightFile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight files."""
        return sum(f.nbytes for f in self.files)

    @property
    def bring_back(self) -> str:
        """The next step where pack, base and leftovers do not give the files again."""
        if "://" in self.cold and not self.cold.startswith(f"{UNMOUNTED}://"):
            return f"remove {self.root}, and run `mergepipe pull-pack {self.cold} {self.name}`"
        if self.is_offline:
            place = f"copy the files of {self.cold} to {self.root}"
            return f"bring the original back: {place}, with their times (`cp -p`)"
        return f"use the original, which is in {self.cold}: its old place {self.root} is taken"

    @property
    def repaired(self) -> str:
        """The next step where its pack is damaged."""
        return f"{self.bring_back}; then run `mergepipe repair` and `mergepipe pack {self.name}`"

    @property
    def is_offline(self) -> bool:
        """Whether weight files are missing at `root`, and no others lie there."""
        there = self._there()
        return len(there) < len(self.files) and self._are_own(there)

    @property
    def is_back(self) -> bool:
        """Whether the files are where they were, by sizes and times, and not a later version."""
        there = self._there()
        return len(there) == len(self.files) and self._are_own(there)

    def _there(self) -> set[Path]:
        """The weight files in the folders that had its own."""
        folders = {(Path(self.root) / file.path).parent for file in self.files}
        return {path for folder in folders for path in folder.glob("*.safetensors")}

    def _are_own(self, there: set[Path]) -> bool:
        own = {Path(self.root) / file.path: file for file in self.files}
        return all(path in own and own[path].is_at(path) for path in there)


class OfflineStore:
    """The folder `offline` of a warehouse."""

    def __init__(self, folder: Path, roots: Roots) -> None:
        self._folder, self._roots = folder, roots

    def path(self, checkpoint_id: str) -> Path:
        """The folder that a checkpoint's record and leftovers are, or would be, in."""
        return self._folder / checkpoint_id

    def address(self, checkpoint_id: str) -> str:
        """The root under which the files of an offline checkpoint are read."""
        return f"{PACKED}{self.path(checkpoint_id)}"

    def ids(self) -> list[str]:
        """The ids of checkpoints that packs stand for, or stood for; sorted."""
        paths = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted(p.name for p in paths if not p.name.startswith("."))

    def all(self) -> list[OfflineExpert]:
        """The experts of all records. Raises CorruptionError as `find`."""
        return [expert for expert in map(self.find, self.ids()) if expert is not None]

    def roots(self) -> frozenset[str]:
        """The folders of experts that are offline, as far as their records can be read."""
        known = []
        for checkpoint_id in self.ids():
            with suppress(CorruptionError):
                known.append(self.find(checkpoint_id))
        return frozenset(expert.root for expert in known if expert and expert.is_offline)

    def find(self, checkpoint_id: str) -> OfflineExpert | None:
        """The record of a checkpoint; None if there is none. Raises CorruptionError."""
        folder, here, data = self.path(checkpoint_id), self._roots.here, b""
        if not folder.is_dir():
            return None
        # It loads pydantic, which commands that only list refs start without.
        from mergepipe_pipeline.storage.forms import read_form

        try:
            data = (folder / RECORD).read_bytes()
            what = "The record of an offline expert"
            expert, _ = read_form(OfflineExpert, data, str(folder / RECORD), what, "")
        except (FileNotFoundError, IsADirectoryError) as error:
            if not folder.is_dir():
                return None
            raise CorruptionError(
                "The record of an offline expert is missing",
                where=str(folder / RECORD),
                expected="what `mergepipe pack --replace` wrote there",
                found="a folder" if isinstance(error, IsADirectoryError) else "no such file",
                next_step=_without_record(folder, b"", here),
            ) from None
        except CorruptionError as error:
            error.next_step = _without_record(folder, data, here)
            raise
        return replace(expert, root=here(expert.root), cold=here(expert.cold))

    def put(self, staged: Path, expert: OfflineExpert) -> None:
        """Write a record beside the leftovers in a folder. Raises StorageFullError."""
        root, cold = self._roots.recorded(expert.root), self._roots.recorded(expert.cold)
        write_atomic(staged / RECORD, seal(asdict(replace(expert, root=root, cold=cold))))

    def forget(self, checkpoint_id: str) -> None:
        """Remove a checkpoint's folder: by one rename first, so that nobody sees a part of it."""
        path = self.path(checkpoint_id)
        gone = path.with_name(f".{checkpoint_id}.old-gone")
        remove_tree(gone)
        remove_tree(rename(path, gone))


def leftover(folder: Path, number: int) -> Path:
    """The bytes of weight file `number` of a record that are in no pack."""
    return folder / f"{number:06d}.leftover"


def sound_leftover(folder: Path, expert: OfflineExpert, number: int) -> Path:
    """The leftover of weight file `number`, after its digest was compared.

    Raises CorruptionError, and CheckpointError if the files came back meanwhile.
    """
    path, file = leftover(folder, number), expert.files[number]
    try:
        found = f"sha256 {file_sha256(path)[:16]}"
    except FileNotFoundError:
        if not folder.exists():
            raise came_back(folder) from None
        found = "no file"
    expected = f"sha256 {file.leftover_sha256[:16]}"
    if found != expected:
        raise CorruptionError(
            "What gives an expert's file back was changed after it was written",
            where=f"{path}, for {file.path} of {expert.name}",
            expected=expected,
            found=found,
            next_step=expert.bring_back,
        )
    return path


def came_back(folder: Path) -> CheckpointError:
    """The error that a record is gone with all that lay beside it in its folder."""
    return CheckpointError(
        "Nothing gives the weight files of an offline checkpoint",
        where=str(folder),
        expected="what `pack --replace` left of them",
        found="nothing: they came back meanwhile, or somebody removed it",
        next_step="run the same command again",
    )


@contextmanager
def original_named(expert: OfflineExpert, *folders: Path) -> Iterator[None]:
    """Add to an error about files in these folders where the original is: nothing helps as much."""
    try:
        yield
    except CorruptionError as error:
        if any(str(folder) in (error.where or "") for folder in folders):
            error.next_step = expert.repaired
            if isinstance(error, DamagedPackError):  # which would mean that trying again helps
                parts = {"expected": error.expected, "found": error.found}
                raise CorruptionError(
                    error.what, where=error.where, next_step=error.next_step, **parts
                ) from None
        raise


def weight_files(
    checkpoint: Checkpoint, packed: Mapping[str, str], staged: Path
) -> tuple[WeightFile, ...]:
    """Hash a local checkpoint's weight files, and write their leftovers into a folder.

    `packed` has the pack's name of each tensor of the checkpoint. Raises StorageFullError,
    MergePipeError for a step of a training run, CheckpointError for what is no regular file, or a
    link that leaves the folder.
    """
    if checkpoint.files[0].path == METADATA:
        raise MergePipeError(
            "A pack cannot stand for the files of a training run's step",
            where=f"{checkpoint.name}, {checkpoint.root}",
            expected="weight files with nothing but the model in them",
            found=f"{METADATA}, and files with the states of optimizers",
            next_step="keep the folder where it is: merges read from the pack what it has",
        )
    make_dirs(staged)
    files = []
    with LocalSource(checkpoint.root, "exact") as source:
        for number, entry in enumerate(checkpoint.files):
            places = sorted(
                (t.start_byte, packed[t.name], t.nbytes)
                for t in checkpoint.tensors
                if t.file == entry.path and t.name in packed
            )
            tensors = tuple((tensor, start, nbytes) for start, tensor, nbytes in places)
            path = leftover(staged, number)
            write_atomic(path, _between(source, entry.path, entry.nbytes, tensors))
            with source.lent(entry.path) as (descriptor, _):
                sha256 = file_sha256(Path(f"/proc/self/fd/{descriptor}"))
                stat = os.fstat(descriptor)
            places_of_file = stat.st_size, stat.st_mtime_ns, sha256, tensors
            files.append(WeightFile(entry.path, *places_of_file, file_sha256(path)))
    return tuple(files)


def _between(
    source: LocalSource, path: str, nbytes: int, tensors: tuple[tuple[str, int, int], ...]
) -> Iterator[bytes]:
    """The bytes of a file that are in none of its packed tensors."""
    at = 0
    for _, start, size in (*tensors, ("", nbytes, 0)):
        for first in range(at, start, _PIECE_NBYTES):
            yield source.read_range(path, first, min(_PIECE_NBYTES, start - first))
        at = start + size


def _without_record(folder: Path, data: bytes, here: Callable[[str], str]) -> str:
    """The next step where the record in a folder cannot be read; what can be read names places."""
    cold, root = (
        here(match[1]) if (match := re.search(rf'"{key}": ?"([^"]+)"', text)) else ""
        for text in [data.decode(errors="replace")]
        for key in ("cold", "root")
    )
    return (
        "restore the file from a copy of the warehouse, and do not remove it: without it the pack "
        f"gives nothing back; if there is no copy, copy the files of {cold or 'cold storage'} to "
        f"{root or 'where they were'}, with their times (`cp -p`), and only then remove {folder}"
    )
