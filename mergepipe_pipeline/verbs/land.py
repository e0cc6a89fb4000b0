"""The verb `land`: put a checkpoint into the inbox whole, or in the place of an older version.

The folder is made beside its place under a name that the inbox passes over, and gets its own name
by one rename. A copy into the inbox itself can be seen half done.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import NAME
from mergepipe_pipeline.deploy.arrivals import mark_landed
from mergepipe_pipeline.deploy.stamps import stamps_of, token_of
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.storage.atomic import copy_file, link_file, remove_tree, replace_dir
from mergepipe_pipeline.storage.open_checkpoint import open_checkpoint
from mergepipe_pipeline.verbs.tag import check_tags
from mergepipe_pipeline.warehouse import Warehouse

#: What a lease of a landing is called, and with it the folder that is made.
LANDING = "landing"
_LEFT = re.compile(rf"\.(?P<name>.+)\.((?P<lease>{LANDING}-[\w-]+)|old-[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Landing:
    """A checkpoint that lies in the inbox: its name, folder, files and bytes."""

    name: str
    path: str
    files: int
    nbytes: int
    replaced: bool


def land(
    warehouse: Warehouse,
    path: str,
    name: str | None = None,
    *,
    link: bool = False,
    tags: Collection[str] = (),
) -> Landing:
    """Put the checkpoint folder at `path` into the inbox; with `link`, without a copy.

    The files at the top of the folder are taken, those that links lead to as files. Linked files
    must not be written to afterwards. The name has the `tags` before the folder is there. Raises
    MergePipeError for a name that cannot be one or a folder of the inbox itself, CheckpointError
    for what is not whole, StorageFullError.
    """
    source = Path(path).resolve()
    chosen = name or source.name
    final = warehouse.inbox / chosen
    _refuse_wrong_places(warehouse, source, chosen)
    check_tags(tags)
    open_checkpoint(str(source), chosen, probes=False)
    replaced = final.exists()
    with _staged(warehouse, chosen) as staged:
        for file in sorted(f for f in source.iterdir() if f.is_file()):
            (link_file if link else copy_file)(file.resolve(), staged / file.name)
            stat = file.stat()
            os.utime(staged / file.name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        open_checkpoint(str(staged), chosen, probes=False)
        stamps, _ = stamps_of(staged)
        mark_landed(warehouse, chosen, token_of(stamps))
        warehouse.catalog.put_tags(chosen, tags, ())
        replace_dir(staged, final)
    return Landing(chosen, str(final), len(stamps), sum(s.nbytes for s in stamps), replaced)


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
    """What landings of dead processes left in the inbox; `living` are the names of leases.

    The older version that a killed landing put aside stays while nothing is in its place.
    """
    for path in sorted(warehouse.inbox.glob(".*")):
        found = _LEFT.fullmatch(path.name)
        if found is None or found["lease"] in living:
            continue
        if found["lease"] or (warehouse.inbox / found["name"]).exists():
            yield path


def _refuse_wrong_places(warehouse: Warehouse, source: Path, name: str) -> None:
    if not source.is_dir():
        found = f"{source}, which is no folder"
    elif warehouse.inbox in source.parents:
        found = f"{source}, which lies in the inbox"
    elif not NAME.fullmatch(name):
        found = f"the name {name!r}"
    else:
        return
    raise MergePipeError(
        "This cannot land in the inbox",
        where=str(source),
        expected="a folder outside the inbox, and a name of letters, digits, '.', '_' and '-'",
        found=found,
        next_step="give another folder, or another name with --name",
    )
