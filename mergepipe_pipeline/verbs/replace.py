"""The verbs `pack --replace` and `unpack`: an expert's files move to cold storage, and come back.

Nothing is moved before the pack and what stays beside it are durable and every file was made from
them once, with the SHA-256 that it had.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.contents.away_files import refuse_other_base
from mergepipe_pipeline.contents.input_segments import checkpoint_inputs
from mergepipe_pipeline.digest import new_hash
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.view import view_of
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.execution.plan_leases import staging
from mergepipe_pipeline.packs.contents import packed_as
from mergepipe_pipeline.packs.decoded import Decoder
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.replaced import (
    MovedFile,
    Replaced,
    files_of,
    folders_of,
    original_named,
    restored,
    write_record,
)
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.resolution.locate import expanded, locate_registered, registered_version
from mergepipe_pipeline.snapshots.export import staging_beside
from mergepipe_pipeline.storage.atomic import (
    copy_file,
    make_dirs,
    publish_dir,
    remove_tree,
    rename,
    replace_dir,
)
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.permissions import give_permissions, make_removable
from mergepipe_pipeline.storage.roots import refuse_unmounted, why_unmounted
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.verbs.cold_places import (
    is_recorded,
    refuse_away,
    refuse_other_files,
    refuse_others_inside,
    refuse_unrecorded,
    refuse_wrong_places,
    taken,
    unrecorded,
)
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
        _clear(record)  # what a killed move has left
        return _moved(record, before=True)
    refuse_away(warehouse, packed)
    root, target = Path(checkpoint.root), expanded(cold).resolve() / Path(checkpoint.root).name
    refuse_wrong_places(packed, root, target)
    refuse_others_inside(warehouse, packed.name, root)
    contents = warehouse.packs.open(packed.pack_id).contents.values()
    digests = warehouse.catalog.digests(checkpoint.checkpoint_id) or {}
    record = Replaced(
        checkpoint.checkpoint_id,
        packed.name,
        str(root),
        str(target),
        packed.base,
        packed.pack_id,
        files_of(root, checkpoint, packed_as(contents, digests)),
        folders_of(root),
    )
    if target.exists():
        refuse_other_files(record)
    with _recorded(warehouse, record):
        with Original(warehouse, record, progress) as original:
            for number, _ in enumerate(record.files):
                original.compare(number)
        now = locate_registered(warehouse, packed.name).checkpoint
        if now.checkpoint_id != record.checkpoint_id:
            raise CorruptionError(
                "The expert changed while it was packed", where=str(root), next_step="pack it again"
            )
        _move(record)
    return _moved(record)


@contextmanager
def _recorded(warehouse: Warehouse, record: Replaced) -> Iterator[None]:
    """Write the record of a move; take it back if the move fails and every file is still there."""
    place = warehouse.replaced.path(record.checkpoint_id)
    is_first = not place.exists()
    with staging(warehouse, "replace") as staged:
        write_record(staged / "record", record, warehouse.roots)
        replace_dir(staged / "record", place)
    try:
        yield
    except BaseException:
        root = Path(record.root)
        if is_first and all((root / file.path).is_file() for file in record.files):
            warehouse.replaced.forget(record.checkpoint_id)
        raise


def unpack(
    warehouse: Warehouse,
    name: str,
    to: str | Path | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Make the files of an expert that `pack --replace` moved away again, bit for bit.

    `name` may pick an older version, as in recipes: NAME@VERSION, or NAME@ and the start of a
    checkpoint id. The files are made where they were, or in `to`, with their times and permission
    bits, and empty folders with them. The base must be there. Raises NotFoundError for an expert
    that was not replaced, MergePipeError for a place that is taken, CheckpointError for a version
    that there is none of or a place that is not mounted, CorruptionError.
    """
    checkpoint = registered_version(warehouse.catalog, name)
    record = warehouse.replaced.find(checkpoint.checkpoint_id)
    if record is None:
        raise _not_moved(warehouse, name, checkpoint)
    if to is None and why_unmounted(record.root):
        refuse_unmounted(record.root)
    target = Path(record.root) if to is None else expanded(to).resolve()
    if target.exists():
        raise taken(target, "--to")
    with (
        original_named(record, warehouse.packs.path(record.pack_id)),
        _beside(target, record) as staged,
        Original(warehouse, record, progress) as original,
    ):
        for number, file in enumerate(record.files):
            original.write(number, staged / file.path)
        _finish_folders(staged, record)
        if not publish_dir(staged, target):
            raise taken(target, "--to")
    is_back = str(target) == record.root
    if is_back and open_checkpoint(record.root, record.name).checkpoint_id == record.checkpoint_id:
        warehouse.replaced.forget(record.checkpoint_id)
    return Moved(
        name, record.cold, str(target), len(record.files), sum(f.nbytes for f in record.files)
    )


def _not_moved(warehouse: Warehouse, name: str, checkpoint: Checkpoint) -> NotFoundError:
    """The error that there is nothing to unpack; names the versions that were moved away."""
    catalog, plain = warehouse.catalog, checkpoint.name
    moved = [
        f"{plain}@{r.version}"
        for r in catalog.history(plain)
        if warehouse.replaced.find(r.checkpoint.checkpoint_id) is not None
    ]
    other = f"; moved away is {', '.join(moved)}" if moved else ""
    is_there = os.path.exists(checkpoint.root) or "://" in checkpoint.root
    use = "use them" if is_there else f"copy its files back to {checkpoint.root}"
    return NotFoundError(
        "This expert's files were not moved away",
        where=name,
        expected="an expert that `mergepipe pack --replace` has moved",
        found=f"{'its own files' if is_there else 'nothing'} at {checkpoint.root}{other}",
        next_step=f"{use}, or run `mergepipe unpack {moved[-1]}`" if moved else use,
    )


class Original:
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

    def __enter__(self) -> Original:
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
        """Write a file, as `_finish_file`. Raises CorruptionError unless it is what it was."""
        file = self._record.files[number]
        make_dirs(path.parent)
        with path.open("xb") as out:  # which follows no link
            out.writelines(self._pieces(number))
        _finish_file(path, file)

    def _pieces(self, number: int) -> Iterator[bytes | memoryview]:
        record, store = self._record, self._warehouse.replaced
        file, running = record.files[number], new_hash()
        try:
            for piece in restored(file, store.rest(record.checkpoint_id, number), self._tensor):
                running.update(piece)
                self._advance(len(piece))
                yield piece
            _refuse_other_bytes(file, running.hexdigest(), Path(record.root))
        except (CorruptionError, FileNotFoundError):
            store.refuse_damaged_rest(record)  # else the fault is the pack's or the base's
            raise

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


def _move(record: Replaced) -> None:
    """Rename the folder; across file systems copy it, compare the copy, and remove it.

    If a copy is there, compare that. Raises MergePipeError for other files there, and for files
    that came into the expert's folder since it was recorded: these stay.
    """
    root, target = Path(record.root), Path(record.cold)
    if target.exists():
        refuse_other_files(record)
        _remove(record)
        return
    make_dirs(target.parent)
    try:
        rename(root, target)
        refuse_unrecorded(record, target, unrecorded(record, target))
        return
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise taken(target, "--cold") from error
        if error.errno != errno.EXDEV:
            raise
    with _beside(target, record) as staged:
        for file in record.files:
            make_dirs((staged / file.path).parent)
            copy_file(root / file.path, staged / file.path)
            _finish_file(staged / file.path, file)
            _refuse_other_bytes(file, file_sha256(staged / file.path), staged)
        _finish_folders(staged, record)
        if not publish_dir(staged, target):
            raise taken(target, "--cold")
    _remove(record)


def _remove(record: Replaced) -> None:
    """Remove an expert's files, which are in cold storage now, and nothing else from its folder.

    That gets another name first, so that nobody finds it to write there. Raises MergePipeError if
    it holds anything that the record does not; that stays.
    """
    aside = _aside(record)
    _clear(record)
    rename(record.root, aside)
    refuse_unrecorded(record, aside, unrecorded(record, aside))
    _clear(record)


def _aside(record: Replaced) -> Path:
    """The name of an expert's folder while its files are removed."""
    root = Path(record.root)
    return root.with_name(f".{root.name}.{record.checkpoint_id[:8]}.moved")


def _clear(record: Replaced) -> None:
    """Remove recorded files one by one from the folder that `_remove` or a killed one renamed."""
    aside = _aside(record)
    if not aside.exists():
        return
    make_removable(aside)
    for file in record.files:
        if is_recorded(file, aside / file.path):
            remove_tree(aside / file.path)
    for folder in reversed(record.folders):  # what lies in a folder comes before it
        with suppress(OSError):  # it is not empty
            (aside / folder.path).rmdir()
    if aside.exists():
        left = sorted(path.relative_to(aside).as_posix() for path in aside.rglob("*"))
        refuse_unrecorded(record, aside, left or ["."])


@contextmanager
def _beside(target: Path, record: Replaced) -> Iterator[Path]:
    """A new folder beside `target`, gone when the context ends; killed runs' folders go first.

    Nobody else may look into it: files get their permission bits after their bytes.
    """
    with staging_beside(target) as staged:
        if record.folders:  # else nothing is known that it would get in the end
            give_permissions(staged, 0o700)
        try:
            yield staged
        finally:
            make_removable(staged)


def _finish_file(path: Path, file: MovedFile) -> None:
    """Give a file that was made again the time and the permission bits that it had."""
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns), follow_symlinks=False)
    if file.mode is not None:
        give_permissions(path, file.mode)


def _finish_folders(staged: Path, record: Replaced) -> None:
    """Make the folders of a record that no file has made, and give all their permission bits."""
    folders = [(staged / folder.path, folder.mode) for folder in record.folders]
    make_dirs(*(path for path, _ in folders))
    for path, mode in reversed(folders):  # what lies in a folder comes before it
        give_permissions(path, mode)


def _refuse_other_bytes(file: MovedFile, sha256: str, where: Path) -> None:
    if sha256 != file.sha256:
        raise CorruptionError(
            "A file is not what it was when the expert was packed",
            where=str(where / file.path),
            expected=f"sha256 {file.sha256[:16]}",
            found=f"sha256 {sha256[:16]}",
            next_step="nothing took its place; `mergepipe verify --all` finds what is damaged",
        )
