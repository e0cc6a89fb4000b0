"""The verbs about a checkpoint's name: `register` makes one known, `tag` gives it words by which
selectors take it, `quarantine` keeps its content out of merges.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Registration
from mergepipe_pipeline.checkpoints.training_run import is_run
from mergepipe_pipeline.errors import MergePipeError, NotFoundError
from mergepipe_pipeline.facts.contents import Contents, content_of
from mergepipe_pipeline.facts.quarantine import Quarantine, decide, quarantine_of
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.remote.address import is_address
from mergepipe_pipeline.resolution.locate import Places, locate_registered, open_path
from mergepipe_pipeline.storage.permissions import this_user
from mergepipe_pipeline.warehouse import Warehouse

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def register(
    warehouse: Warehouse, path: str | Path, name: str | None = None, base: str | None = None
) -> Registration:
    """Register the checkpoint at a path or an address under `name` (default: its folder's name).

    An unchanged checkpoint adds no version. Raises CheckpointError for what is not a readable
    checkpoint, NotFoundError for an unknown base.
    """
    if base is not None:
        base = locate_registered(warehouse, base).name
    by_link = None
    if is_address(str(path)) or is_run(str(path)):
        found = Places(warehouse).locate(str(path))
        checkpoint = replace(found, name=name or found.name)
    else:
        checkpoint = open_path(warehouse, path, name)
        by_link = Path(path) == warehouse.inbox / checkpoint.name and Path(path).is_symlink()
    return warehouse.catalog.register(checkpoint, base, is_meant=True, by_link=by_link)


def check_tags(tags: Collection[str]) -> None:
    """Raise MergePipeError for the first that cannot be a tag."""
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise MergePipeError(
                "Not a tag",
                where="tags",
                expected="up to 64 letters, digits, '.', '_' and '-', a letter or digit first",
                found=repr(tag),
                next_step="choose another",
            )


def tag(
    warehouse: Warehouse, name: str, add: Collection[str] = (), remove: Collection[str] = ()
) -> frozenset[str]:
    """Add and remove tags of a registered name, or of a folder of the inbox; all that it has then.

    They belong to the name, whatever its version. Raises NotFoundError with the nearest names, and
    CommitConflictError if somebody else changes them at the same moment.
    """
    check_tags([*add, *remove])
    catalog = warehouse.catalog
    landed = (path.name for path in warehouse.inbox.iterdir() if path.is_dir())
    if name not in catalog and name not in landed:
        catalog.root(name)  # raises, and says which names there are
    return catalog.put_tags(name, add, remove)


def quarantine(
    warehouse: Warehouse,
    name: str,
    *,
    reason: str = "by hand",
    release: bool = False,
    progress: Progress | None = None,
) -> Quarantine:
    """Decide about the content that is registered under a name.

    Recipes that name the expert wait then, and their refs stay; a version with another content is
    taken by itself. Raises NotFoundError for an unknown name, and for a release of what is not in
    quarantine.
    """
    checkpoint = warehouse.catalog.get(name).checkpoint
    Contents(warehouse, checkpoint, progress).learn()
    if release and quarantine_of(warehouse, name) is None:
        raise NotFoundError(
            "This expert is not in quarantine",
            where=name,
            expected="an expert whose present content is kept out",
            found=f"checkpoint {checkpoint.checkpoint_id[:8]}, which recipes may merge",
            next_step="see `mergepipe ls` for those that are",
        )
    content = content_of(warehouse.catalog, checkpoint)
    return decide(warehouse, name, content, reason, is_kept_out=not release, by=this_user())
