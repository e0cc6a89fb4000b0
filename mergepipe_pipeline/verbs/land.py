"""The verb `land`: put a checkpoint into the inbox whole, or in the place of an older version.

The folder is made beside its place under a name that the inbox passes over, and gets its own name
by one rename. A copy into the inbox itself can be seen half done.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe_pipeline.checkpoints.open_checkpoint import model_files, open_checkpoint
from mergepipe_pipeline.deploy.arrivals import (
    arrival,
    landing_of,
    mark_landed,
    stamps_of,
    token_of,
)
from mergepipe_pipeline.domain.bounds import NAME
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import CheckpointChangedError, MergePipeError
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.remote.address import is_address
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.storage.atomic import (
    copy_file,
    link_file,
    remove_tree,
    replace_dir,
    write_atomic,
)
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.storage.side_files import pieces
from mergepipe_pipeline.storage.source import (
    CheckpointSource,
    FileRange,
    LocalSource,
    open_folder,
)
from mergepipe_pipeline.verbs.register import check_tags
from mergepipe_pipeline.warehouse import Warehouse

#: What a lease of a landing is called, and with it the folder that is made.
LANDING = "landing"
_LEFT = re.compile(rf"\.(?P<name>.+)\.((?P<lease>{LANDING}-[\w-]+)|old-[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Landing:
    """A checkpoint that lies in the inbox: its name, folder, files and bytes.

    What is `left_out` of the folder that it came from is no part of a model.
    """

    name: str
    path: str
    files: int
    nbytes: int
    replaced: bool
    left_out: tuple[str, ...]


def land(
    warehouse: Warehouse,
    path: str,
    name: str | None = None,
    *,
    link: bool = False,
    tags: Collection[str] = (),
    progress: Progress | None = None,
) -> Landing:
    """Put the checkpoint at a folder or an address into the inbox; with `link`, without a copy.

    Its weights, config, card and side files are taken, by the list that merges have, and nothing
    besides. Linked files must not be written to afterwards. The name has the `tags` before the
    folder is there. Raises MergePipeError for a name that cannot be one or a folder of the inbox
    itself, CheckpointError for what is not whole or a link that leaves the folder,
    CheckpointChangedError for weights that change meanwhile, RemoteError for an address that cannot
    be read, StorageFullError.
    """
    check_tags(tags)
    checkpoint = _opened(warehouse, path, name)
    chosen = checkpoint.name
    final = warehouse.inbox / chosen
    replaced = final.exists()
    with _staged(warehouse, chosen) as staged, open_folder(checkpoint.root, "ahead") as source:
        sizes = model_files(source, checkpoint)
        taken = {file.partition("/")[0] for file in sizes}
        left_out = tuple(text_of(file) for file in source.list() if file not in taken)
        if isinstance(source, LocalSource):
            _copy(source, checkpoint, sizes, staged, link=link)
        else:
            _download(source, checkpoint, sizes, staged, progress or Silent())
        open_checkpoint(str(staged), chosen, probes=False)
        stamps, _ = stamps_of(staged)
        mark_landed(warehouse, chosen, token_of(stamps))
        warehouse.catalog.put_tags(chosen, tags, ())
        replace_dir(staged, final)
    nbytes = sum(s.nbytes for s in stamps)
    return Landing(chosen, str(final), len(stamps), nbytes, replaced, left_out)


def land_for(warehouse: Warehouse, name: str, path: str, event: str) -> Landing | None:
    """Land what an `event` made, once for each; None where it has landed before."""
    with landing_of(warehouse, name, event) as is_due:
        return land(warehouse, path, name) if is_due else None


def is_to_land(warehouse: Warehouse, name: str, path: str, event: str) -> bool:
    """Whether what an `event` made has yet to land; addresses are not looked at.

    Raises MergePipeError for a place that nothing can land from, as one that starts from the folder
    of whoever asks, CheckpointError for what is not whole.
    """
    if arrival(warehouse, name).event == event:
        return False
    if not is_address(path):
        if not os.path.isabs(path):
            raise MergePipeError(
                "This cannot land by itself",
                where=path,
                expected="the whole path of a folder, or an address",
                found="a path that starts from the folder of some process",
                next_step="say Path(...).resolve() where the checkpoint is made",
            )
        _opened(warehouse, path, name)
    return True


def _opened(warehouse: Warehouse, path: str, name: str | None) -> Checkpoint:
    """What is to land, under the name that it gets."""
    remote = Places(warehouse).locate(path) if is_address(path) else None
    folder = Path(path if remote is None else remote.root).resolve()
    chosen = name or (folder.name if remote is None else remote.name)
    if remote is None or not is_address(remote.root):
        _refuse_wrong_places(warehouse, folder, chosen)
        return open_checkpoint(str(folder), chosen, probes=False)
    if NAME.fullmatch(chosen):
        return replace(remote, name=chosen)
    raise _misplaced(path, f"the name {chosen!r}")


def _copy(
    source: LocalSource, before: Checkpoint, files: Iterable[str], staged: Path, *, link: bool
) -> None:
    """Put files of a folder into another one, with their times.

    Each is copied through a descriptor that was looked at, so that nobody swaps it in between.
    Raises CheckpointChangedError for weights that change meanwhile.
    """
    for file in files:
        target = staged / file
        target.parent.mkdir(exist_ok=True)
        with source.lent(file) as (descriptor, _):
            (link_file if link else copy_file)(f"/proc/self/fd/{descriptor}", target)
            stat = os.fstat(descriptor)
        os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if open_checkpoint(before.root, before.name, probes=False).stamp != before.stamp:
        raise CheckpointChangedError(
            "A checkpoint changed while it was copied",
            where=before.root,
            expected="weight files of one size and time from start to end",
            found="files of another size or time",
            next_step="run the same command again when nothing writes to them",
        )


def _download(
    source: CheckpointSource,
    checkpoint: Checkpoint,
    sizes: Mapping[str, int],
    staged: Path,
    progress: Progress,
) -> None:
    source.expect(FileRange(name, 0, nbytes) for name, nbytes in sizes.items())
    with progress.task(f"download {checkpoint.name}", sum(sizes.values())) as advance:
        for name, nbytes in sizes.items():
            told = pieces(source, name, nbytes, lambda piece: advance(len(piece)))
            write_atomic(staged / name, told)


@contextmanager
def _staged(warehouse: Warehouse, name: str) -> Iterator[Path]:
    """A new folder beside the place where `name` lands, leased, gone when the context ends."""
    with warehouse.leases.hold(Need(), LANDING) as lease:
        staged = warehouse.inbox / f".{name}.{lease}"
        try:
            staged.mkdir()
            yield staged
        finally:
            remove_tree(staged)


def half_landed(warehouse: Warehouse, living: Collection[str]) -> Iterator[Path]:
    """Leftovers of landings of dead processes in the inbox; `living` are the names of leases.

    The older version that a killed landing put aside stays while nothing is in its place.
    """
    for path in sorted(warehouse.inbox.glob(".*")):
        leftover = _LEFT.fullmatch(path.name)
        if leftover is None or leftover["lease"] in living:
            continue
        if leftover["lease"] or (warehouse.inbox / leftover["name"]).exists():
            yield path


def _refuse_wrong_places(warehouse: Warehouse, source: Path, name: str) -> None:
    if not source.is_dir():
        problem = f"{source}, which is no folder"
    elif warehouse.inbox in source.parents:
        problem = f"{source}, which lies in the inbox"
    elif not NAME.fullmatch(name):
        problem = f"the name {name!r}"
    else:
        return
    raise _misplaced(str(source), problem)


def _misplaced(where: str, found: str) -> MergePipeError:
    return MergePipeError(
        "This cannot land in the inbox",
        where=where,
        expected="a folder outside the inbox, and a name of letters, digits, '.', '_' and '-'",
        found=found,
        next_step="give another folder, or another name with --name",
    )
