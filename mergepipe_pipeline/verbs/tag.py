"""The verb `tag`: words for a checkpoint's name, by which selectors of recipes take it."""

from __future__ import annotations

import re
from collections.abc import Collection

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.warehouse import Warehouse

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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
    if name not in catalog and not _is_in_inbox(warehouse, name):
        catalog.root(name)  # raises, and says which names there are
    return catalog.put_tags(name, add, remove)


def _is_in_inbox(warehouse: Warehouse, name: str) -> bool:
    return name in (path.name for path in warehouse.inbox.iterdir() if path.is_dir())
