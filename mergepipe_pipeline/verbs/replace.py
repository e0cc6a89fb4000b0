"""The verbs `pack --replace` and `unpack`: weight files move to cold storage, and come back.

Config, tokenizer and all else stay in the expert's folder. Nothing leaves it before every weight
file was made once from pack and leftovers with the SHA-256 that it has, lies in cold storage, and
the record of it is durable. Files go one by one: whoever dies between two leaves an expert that is
read from its pack, and the same command ends what was begun.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.checkpoints.open_checkpoint import model_files, open_checkpoint
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.digest import new_hash
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import CorruptionError, MergePipeError, NotFoundError
from mergepipe_pipeline.execution.plan_leases import staging
from mergepipe_pipeline.facts.offline import offline_at
from mergepipe_pipeline.facts.pack_source import PackFiles
from mergepipe_pipeline.packs.contents import packed_as
from mergepipe_pipeline.packs.offline import (
    OfflineExpert,
    WeightFile,
    original_named,
    weight_files,
)
from mergepipe_pipeline.progress import Advance, Progress, Silent
from mergepipe_pipeline.resolution.locate import expanded, locate_registered, registered_version
from mergepipe_pipeline.snapshots.export import staging_beside
from mergepipe_pipeline.storage.atomic import (
    adopt_file,
    copy_file,
    link_file,
    make_dirs,
    publish_dir,
    remove_tree,
    rename,
    replace_dir,
)
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.locks import locked_there
from mergepipe_pipeline.storage.roots import refuse_unmounted, why_unmounted
from mergepipe_pipeline.verbs.pack import Packed
from mergepipe_pipeline.warehouse import Warehouse

_PIECE_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Moved:
    """An expert whose weight files went from `root` to `cold`, now or `before`."""

    name: str
    root: str
    cold: str
    files: int
    nbytes: int
    before: bool = False


def move_to_cold(
    warehouse: Warehouse, packed: Packed, cold: str | Path, progress: Progress | None = None
) -> Moved:
    """Move the weight files of an expert that was packed below the folder `cold`.

    Files that are there already, as an `unpack` leaves them, are compared and kept. Raises
    MergePipeError for files that are not the expert's own, CorruptionError if not every file can be
    made again; then nothing is moved.
    """
    checkpoint = locate_registered(warehouse, packed.name).checkpoint
    target = expanded(cold).resolve() / Path(checkpoint.root).name
    expert = warehouse.offline.find(checkpoint.checkpoint_id)
    if expert is not None and expert.is_offline and expert.pack_id == packed.pack_id:
        _remove(expert)  # what a killed move has left
        return _moved(expert, before=True)
    _refuse(warehouse, packed, checkpoint, target)
    return replace_weights(warehouse, packed, checkpoint, str(target), progress)


def replace_weights(
    warehouse: Warehouse,
    packed: Packed,
    checkpoint: Checkpoint,
    cold: str,
    progress: Progress | None = None,
) -> Moved:
    """Let a pack stand for a local checkpoint's weight files, which go to the folder `cold`.

    Where `cold` is an address they lie there already. Raises as `move_to_cold`.
    """
    pack = warehouse.packs.open(packed.pack_id)
    digests = warehouse.catalog.digests(checkpoint.checkpoint_id) or {}
    with staging(warehouse, "replace") as staged:
        folder = staged / "record"
        expert = OfflineExpert(
            checkpoint.checkpoint_id,
            packed.name,
            checkpoint.root,
            cold,
            packed.base,
            packed.pack_id,
            weight_files(checkpoint, packed_as(pack.contents.values(), digests), folder),
        )
        with (
            PackFiles(warehouse, expert, folder) as source,
            (progress or Silent()).task(f"unpack {expert.name}", expert.nbytes) as advance,
        ):
            for file in expert.files:
                for _ in compared_pieces(source, file, checkpoint.root, advance):
                    pass
        if "://" not in cold:
            _put_in_cold(expert)
        now = locate_registered(warehouse, packed.name).checkpoint
        if now.checkpoint_id != expert.checkpoint_id:
            raise CorruptionError(
                "The expert changed while it was packed",
                where=expert.root,
                next_step="pack it again",
            )
        warehouse.offline.put(folder, expert)
        replace_dir(folder, warehouse.offline.path(expert.checkpoint_id))
    _remove(expert)
    return _moved(expert)


def unpack(
    warehouse: Warehouse,
    name: str,
    to: str | Path | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Make the weight files of an expert that `pack --replace` moved away again, bit for bit.

    `name` may pick an older version, as in recipes: NAME@VERSION, or NAME@ and the start of a
    checkpoint id. The files are made where they were, with their times, or in the new folder `to`,
    which gets config and tokenizer, too, unless another version's lie there now. The base must be
    there. Raises NotFoundError for an expert that was not replaced, MergePipeError for a place that
    is taken, CheckpointError for a version that there is none of or a place that is not mounted,
    CorruptionError.
    """
    checkpoint = registered_version(warehouse.catalog, name)
    expert = warehouse.offline.find(checkpoint.checkpoint_id)
    if expert is None:
        raise _not_moved(warehouse, name, checkpoint)
    if to is None and why_unmounted(expert.root):
        refuse_unmounted(expert.root)
    target, last = Path(expert.root), offline_at(warehouse, expert.root)
    is_last = last is not None and last.checkpoint_id == expert.checkpoint_id
    if to is not None:
        target = expanded(to).resolve()
    if target.exists() and (to is not None or not is_last):
        raise _taken(target, "--to")
    folder = warehouse.offline.path(expert.checkpoint_id)
    with (
        original_named(expert, warehouse.packs.path(expert.pack_id)),
        staging_beside(target) as staged,
        PackFiles(warehouse, expert, folder) as source,
        (progress or Silent()).task(f"unpack {expert.name}", expert.nbytes) as advance,
    ):
        for file in expert.files:
            if to is None and _is_there(expert, file):
                continue
            write_weights(source, file, staged / file.path, advance)
        if to is not None and is_last:
            for beside in model_files(source, checkpoint):
                if not (staged / beside).exists():
                    make_dirs((staged / beside).parent)
                    copy_file(Path(expert.root) / beside, staged / beside)
        if not _placed(expert, staged, target):
            raise _taken(target, "--to")
    if to is None and open_checkpoint(expert.root, name).checkpoint_id == expert.checkpoint_id:
        warehouse.offline.forget(expert.checkpoint_id)
    return Moved(name, expert.cold, str(target), len(expert.files), expert.nbytes)


def _is_there(expert: OfflineExpert, file: WeightFile) -> bool:
    """Whether a move or an unpack that was killed has left a file, which gets its name again."""
    path, aside = Path(expert.root) / file.path, _aside(expert, file)
    if file.is_at(aside) and not os.path.lexists(path):
        rename(aside, path)
    return file.is_at(path)


def write_weights(source: PackFiles, file: WeightFile, path: Path, advance: Advance) -> None:
    """Write a weight file with the time that it had. Raises CorruptionError for other bytes."""
    make_dirs(path.parent)
    with path.open("xb") as out:  # which follows no link
        out.writelines(compared_pieces(source, file, str(path.parent), advance))
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns), follow_symlinks=False)


def compared_pieces(
    source: PackFiles, file: WeightFile, where: str, advance: Advance
) -> Iterator[bytes]:
    """The bytes of a weight file as pack and leftovers give them, a piece at a time.

    Raises CorruptionError at the end unless all together have the file's SHA-256.
    """
    running = new_hash()
    starts = range(0, file.nbytes, _PIECE_NBYTES)

    def read(start: int) -> bytes:
        return source.read_range(file.path, start, min(_PIECE_NBYTES, file.nbytes - start))

    with Workers(threads.analysis()) as workers:
        for piece in workers.map(read, starts, depth=threads.analysis() + 2):
            running.update(piece)
            advance(len(piece))
            yield piece
    if running.hexdigest() != file.sha256:
        raise CorruptionError(
            "A file is not what it was when the expert was packed",
            where=f"{where}, {file.path}",
            expected=f"sha256 {file.sha256[:16]}",
            found=f"sha256 {running.hexdigest()[:16]}",
            next_step="nothing took its place; `mergepipe verify --all` finds what is damaged",
        )


def _placed(expert: OfflineExpert, staged: Path, target: Path) -> bool:
    """Give staged files their places; False if anything is in one of these."""
    if not target.exists():
        return publish_dir(staged, target)
    with locked_there(target):
        for file in expert.files:
            if (staged / file.path).exists():
                if os.path.lexists(target / file.path):
                    return False
                adopt_file(staged / file.path, target / file.path)
    return True


def _not_moved(warehouse: Warehouse, name: str, checkpoint: Checkpoint) -> NotFoundError:
    """The error that there is nothing to unpack; names the versions that were moved away."""
    catalog, plain = warehouse.catalog, checkpoint.name
    moved = [
        f"{plain}@{r.version}"
        for r in catalog.history(plain)
        if warehouse.offline.find(r.checkpoint.checkpoint_id) is not None
    ]
    other = f"; moved away is {', '.join(moved)}" if moved else ""
    first = Path(checkpoint.root) / checkpoint.files[0].path
    is_there = "://" in checkpoint.root or Path(checkpoint.root).is_file() or first.exists()
    use = "use them" if is_there else f"copy its files back to {checkpoint.root}"
    return NotFoundError(
        "This expert's files were not moved away",
        where=name,
        expected="an expert that `mergepipe pack --replace` has moved",
        found=f"{'its own files' if is_there else 'no weight file'} at {checkpoint.root}{other}",
        next_step=f"{use}, or run `mergepipe unpack {moved[-1]}`" if moved else use,
    )


def _moved(expert: OfflineExpert, *, before: bool = False) -> Moved:
    count = len(expert.files)
    return Moved(expert.name, expert.root, expert.cold, count, expert.nbytes, before)


def _refuse(warehouse: Warehouse, packed: Packed, checkpoint: Checkpoint, target: Path) -> None:
    """Refuse files that are not a folder's own, or that have no room where they are to go."""
    for expected, found, next_step in (
        *_offline_experts(warehouse, packed),
        *_unfit_files(warehouse, checkpoint),
        *_unfit_places(Path(checkpoint.root), target),
    ):
        raise MergePipeError(
            "An expert's files cannot be moved away",
            where=f"{packed.name}, {checkpoint.root}",
            expected=expected,
            found=found,
            next_step=next_step,
        )


#: What is expected and found, and the next step.
_Problems = Iterator[tuple[str, str, str]]


def _offline_experts(warehouse: Warehouse, packed: Packed) -> _Problems:
    for name in (packed.name, packed.base):  # two could stand for each other
        if locate_registered(warehouse, name).checkpoint.is_offline:
            found = "none: they were moved away before, for another pack"
            yield f"the files of {name}", found, f"run `mergepipe unpack {name}` first"


def _unfit_files(warehouse: Warehouse, checkpoint: Checkpoint) -> _Problems:
    root, catalog = Path(checkpoint.root), warehouse.catalog
    files = [root / file.path for file in checkpoint.files]
    copy = "copy the files into a folder, and register that under the same name"
    if not root.is_dir() or any(p.is_symlink() or not p.is_file() for p in files):
        yield "a folder of plain files", "links, or no plain file", copy
    if beside := checkpoint.ignored_files:
        found = f"weights beside it: {', '.join(beside)}"
        yield "a folder with the weights of one model", found, "move these elsewhere"
    own = "weight files of this expert alone"
    for name in catalog.names():
        place = Path(catalog.root(name))
        if place != root and any(file.is_relative_to(place) for file in files):
            yield own, f"{name} at {place}", copy
    if root.is_relative_to(warehouse.root) and not root.is_relative_to(warehouse.inbox):
        yield own, "a folder of the warehouse", copy


def _unfit_places(root: Path, target: Path) -> _Problems:
    cold = "choose another --cold"
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir()):
        yield f"room for a folder at {target}", "something else there", cold
    if target.is_relative_to(root) or (target.exists() and target.samefile(root)):
        yield "a --cold outside of the expert's folder", str(target), cold


def _taken(target: Path, option: str, found: str = "one") -> MergePipeError:
    return MergePipeError(
        "The place for an expert's files is taken",
        where=str(target),
        expected="no such file or folder yet",
        found=found,
        next_step=f"give another place with {option}",
    )


def _put_in_cold(expert: OfflineExpert) -> None:
    """Link weight files into cold storage; copy and compare them where there are no links.

    Raises MergePipeError for other files there, CorruptionError for a copy with other bytes.
    """
    target = Path(expert.cold)
    make_dirs(target)
    with locked_there(target):
        for file in expert.files:
            own, there = Path(expert.root) / file.path, target / file.path
            if there.parent.exists() and there.parent.samefile(own.parent):
                raise _taken(there, "--cold", "the expert's own file under another path")
            if os.path.lexists(there):
                if there.is_symlink() or not there.is_file() or file_sha256(there) != file.sha256:
                    raise _taken(there, "--cold", "another file")
                continue
            staged = there.with_name(f".{there.name}.part")
            make_dirs(there.parent)
            remove_tree(staged)
            link_file(own, staged)
            if not staged.samefile(own) and file_sha256(staged) != file.sha256:
                raise CorruptionError(
                    "A file is not what it was when the expert was packed",
                    where=str(staged),
                    expected=f"sha256 {file.sha256[:16]}",
                    found="other bytes",
                    next_step="nothing took its place; look at the disk, then run it again",
                )
            os.utime(staged, ns=(file.mtime_ns, file.mtime_ns))
            adopt_file(staged, there)


def _remove(expert: OfflineExpert) -> None:
    """Remove an expert's weight files, which are in cold storage, one by one.

    Each gets another name first, so that nobody finds it to write there. Raises MergePipeError for
    one that changed meanwhile; that stays.
    """
    for file in expert.files:
        path = Path(expert.root) / file.path
        aside = _aside(expert, file)
        if os.path.lexists(path) and not os.path.lexists(aside):
            with suppress(FileNotFoundError):
                rename(path, aside)
        if not os.path.lexists(aside):
            continue
        if not file.is_at(aside):
            place = aside if os.path.lexists(path) else rename(aside, path)
            raise MergePipeError(
                "A weight file changed while it was moved away",
                where=str(place),
                expected=f"{file.nbytes} bytes, as they were packed",
                found="another size or time",
                next_step=f"nothing of it is removed: the one that was packed is in {expert.cold}; "
                "register the new version, or remove it",
            )
        remove_tree(aside)


def _aside(expert: OfflineExpert, file: WeightFile) -> Path:
    """The name of a weight file while it is removed."""
    path = Path(expert.root) / file.path
    return path.with_name(f".{path.name}.{expert.checkpoint_id[:8]}.moved")
