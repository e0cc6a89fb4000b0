"""The verbs `pack --replace` and `unpack`: an expert's files move to cold storage, and come back.

Nothing is moved before the pack and what stays beside it are durable and every file was made from
them once, with the SHA-256 that it had.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.contents.away_files import refuse_other_base
from mergepipe_pipeline.contents.input_segments import checkpoint_inputs
from mergepipe_pipeline.digest import new_hash
from mergepipe_pipeline.errors import CorruptionError, MergePipeError, NotFoundError
from mergepipe_pipeline.execution.plan_leases import staging
from mergepipe_pipeline.packs.decoded import Decoder
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.replaced import MovedFile, Replaced, files_of, restored, write_record
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.resolution.locate import expanded, locate_registered
from mergepipe_pipeline.spec.view import view_of
from mergepipe_pipeline.storage.atomic import (
    copy_file,
    make_dirs,
    publish_dir,
    remove_tree,
    rename,
    replace_dir,
)
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.open_checkpoint import open_checkpoint
from mergepipe_pipeline.storage.reader import BlockReader
from mergepipe_pipeline.storage.roots import refuse_unmounted, why_unmounted
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.verbs.pack import Packed
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Moved:
    """An expert whose files went from `root` to `cold`, now or `before`."""

    name: str
    root: str
    cold: str
    files: int
    nbytes: int
    before: bool = False


def move_to_cold(
    warehouse: Warehouse, packed: Packed, cold: str | Path, progress: Progress | None = None
) -> Moved:
    """Move the files of an expert that was packed into the folder `cold`.

    Files that are there already, as an `unpack` leaves them, are compared and kept. Raises
    MergePipeError for files that are not the expert's own folder or a pack without tier X,
    CorruptionError if not every file can be made again; then nothing is moved.
    """
    checkpoint = locate_registered(warehouse, packed.name).checkpoint
    record = warehouse.replaced.find(checkpoint.checkpoint_id)
    if record is not None and record.is_away and record.pack_id == packed.pack_id:
        return _moved(record, before=True)
    _refuse_away(warehouse, packed)
    root, target = Path(checkpoint.root), expanded(cold).resolve() / Path(checkpoint.root).name
    _refuse_wrong_places(packed, root, target)
    known = warehouse.packs.open(packed.pack_id)
    record = Replaced(
        checkpoint.checkpoint_id,
        packed.name,
        str(root),
        str(target),
        packed.base,
        packed.pack_id,
        files_of(root, checkpoint, list(known.contents)),
    )
    if target.exists():
        _refuse_other_files(record)
    store = warehouse.replaced
    with staging(warehouse, "replace") as staged:
        write_record(staged / "record", record, warehouse.roots)
        replace_dir(staged / "record", store.path(record.checkpoint_id))
    with _Original(warehouse, record, progress) as original:
        for number, _ in enumerate(record.files):
            original.compare(number)
    if locate_registered(warehouse, packed.name).checkpoint.checkpoint_id != record.checkpoint_id:
        raise CorruptionError(
            "The expert changed while it was packed", where=str(root), next_step="pack it again"
        )
    _move(record)
    return _moved(record)


def unpack(
    warehouse: Warehouse,
    name: str,
    to: str | Path | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Make the files of an expert that `pack --replace` moved away again, bit for bit.

    By default where they were. The base must be there. Raises NotFoundError for an expert that was
    not replaced, MergePipeError for a place that is taken, CheckpointError for one that is not
    mounted, CorruptionError.
    """
    checkpoint_id = warehouse.catalog.get(name).checkpoint.checkpoint_id
    record = warehouse.replaced.find(checkpoint_id)
    if record is None:
        raise NotFoundError(
            "This expert's files were not moved away",
            where=name,
            expected="an expert that `mergepipe pack --replace` has moved",
            found=f"its own files at {warehouse.catalog.root(name)}",
            next_step="use them",
        )
    if to is None and why_unmounted(record.root):
        refuse_unmounted(record.root)
    target = Path(record.root) if to is None else expanded(to).resolve()
    if target.exists():
        raise MergePipeError(
            "The place for an expert's files is taken",
            where=str(target),
            expected="no such folder yet",
            found="one",
            next_step="give another place with --to",
        )
    with _beside(target) as staged, _Original(warehouse, record, progress) as original:
        for number, file in enumerate(record.files):
            original.write(number, staged / file.path)
        publish_dir(staged, target)
    is_back = str(target) == record.root
    if is_back and open_checkpoint(record.root, name).checkpoint_id == record.checkpoint_id:
        remove_tree(warehouse.replaced.path(record.checkpoint_id))
    return Moved(
        name, record.cold, str(target), len(record.files), sum(f.nbytes for f in record.files)
    )


class _Original:
    """The files of a replaced expert, made from its pack, its base and what stays of it."""

    def __init__(self, warehouse: Warehouse, record: Replaced, progress: Progress | None) -> None:
        self._warehouse, self._record = warehouse, record
        self._pack = warehouse.packs.open(record.pack_id)
        self._base = locate_registered(warehouse, record.base).checkpoint
        self._known = checkpoint_inputs(warehouse, [self._base], progress)
        self._refuse_other_base()
        self._source = open_source(self._base.root)
        reader = BlockReader(self._source, self._base, None)
        self._files = FrameFiles(self._pack.root)
        self._decoder = Decoder(self._files, lambda _: reader, self._known)
        nbytes = sum(f.nbytes for f in record.files)
        self._task = (progress or Silent()).task(f"unpack {record.name}", nbytes)

    def __enter__(self) -> _Original:
        self._advance = self._task.__enter__()
        return self

    def __exit__(self, *ended: object) -> None:
        self._task.__exit__(None, None, None)
        self._files.__exit__()
        self._source.close()

    def compare(self, number: int) -> None:
        """Raise CorruptionError unless a file is what it was; writes nothing."""
        for _ in self._pieces(number):
            pass

    def write(self, number: int, path: Path) -> None:
        """Write a file with its time. Raises CorruptionError unless it is what it was."""
        file = self._record.files[number]
        make_dirs(path.parent)
        with path.open("wb") as out:
            out.writelines(self._pieces(number))
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))

    def _pieces(self, number: int) -> Iterator[bytes | memoryview]:
        record = self._record
        file, running = record.files[number], new_hash()
        rest = self._warehouse.replaced.rest(record.checkpoint_id, number)
        for piece in restored(file, rest, self._tensor):
            running.update(piece)
            self._advance(len(piece))
            yield piece
        _refuse_other_bytes(file, running.hexdigest(), Path(record.root))

    def _tensor(self, name: str) -> Iterator[memoryview]:
        tensor = self._pack.tensors[name]
        return self._decoder.stored(tensor, view_of(self._base.by_name[tensor.base_name]))

    def _refuse_other_base(self) -> None:
        digests = self._warehouse.catalog.digests(self._base.checkpoint_id) or {}
        for content in self._pack.contents.values():
            refuse_other_base(
                self._record, self._base, digests, content.base_name, content.base_digest
            )


def _moved(record: Replaced, *, before: bool = False) -> Moved:
    nbytes = sum(f.nbytes for f in record.files)
    return Moved(record.name, record.root, record.cold, len(record.files), nbytes, before)


def _refuse_away(warehouse: Warehouse, packed: Packed) -> None:
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


def _refuse_wrong_places(packed: Packed, root: Path, target: Path) -> None:
    odd = [p for p in (root, *root.rglob("*")) if p.is_symlink() or not (p.is_dir() or p.is_file())]
    if "X" not in packed.tier_nbytes:
        expected, found = "a pack with tier X", f"one of {', '.join(packed.tier_nbytes)}"
        next_step = f"run `mergepipe pack {packed.name}` without --tiers"
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


def _refuse_other_files(record: Replaced) -> None:
    """Raise MergePipeError unless `cold` holds a copy of the files of a record, and no others.

    Links to the expert's files, or another path to them, are no copy: they go with the files.
    """
    root, target = Path(record.root), Path(record.cold)
    expected = {file.path: file.sha256 for file in record.files}
    paths = [p for p in target.rglob("*") if p.is_symlink() or not p.is_dir()]
    found = {p.relative_to(target).as_posix() for p in paths}
    if any(p.is_symlink() or not p.is_file() for p in paths):
        problem = "links or special files"
    elif found != expected.keys():
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


def _move(record: Replaced) -> None:
    """Rename the folder; across file systems copy it, compare the copy, and remove it.

    If a copy is there, compare that. Raises MergePipeError for other files there.
    """
    root, target = Path(record.root), Path(record.cold)
    if target.exists():
        _refuse_other_files(record)
        remove_tree(root)
        return
    make_dirs(target.parent)
    try:
        rename(root, target)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    with _beside(target) as staged:
        for file in record.files:
            make_dirs((staged / file.path).parent)
            copy_file(root / file.path, staged / file.path)
            os.utime(staged / file.path, ns=(file.mtime_ns, file.mtime_ns))
            _refuse_other_bytes(file, file_sha256(staged / file.path), staged)
        publish_dir(staged, target)
    remove_tree(root)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, gone when the context ends."""
    staged = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    make_dirs(staged)
    try:
        yield staged
    finally:
        remove_tree(staged)


def _refuse_other_bytes(file: MovedFile, sha256: str, where: Path) -> None:
    if sha256 != file.sha256:
        raise CorruptionError(
            "A file is not what it was when the expert was packed",
            where=str(where / file.path),
            expected=f"sha256 {file.sha256[:16]}",
            found=f"sha256 {sha256[:16]}",
            next_step="nothing was moved; `mergepipe verify --all` finds what is damaged",
        )
