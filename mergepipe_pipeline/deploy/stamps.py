"""What `stat` tells of a folder's files: a token that changes with them, and what looks half done.

No file is opened here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mergepipe_pipeline.checkpoints.open_checkpoint import is_shard
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.storage.regular import text_of

_WEIGHTS = ".safetensors"


class Stamp(NamedTuple):
    """One file of a folder: its name, size in bytes, and time of last change in nanoseconds."""

    name: str
    nbytes: int
    mtime_ns: int


def stamps_of(folder: Path) -> tuple[tuple[Stamp, ...], int]:
    """All in a folder but folders, in name order, and when any of it changed last (ns since 1970).

    Of links, what they lead to; of a single file, its own. The time is the system's own (ctime),
    since copies that keep times set the other one back. Raises OSError.
    """
    if folder.is_file():
        stat = folder.stat()
        return (Stamp(text_of(folder.name), stat.st_size, stat.st_mtime_ns),), stat.st_ctime_ns
    stamps, changed_ns = [], 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_dir():
                    continue
                stat = entry.stat()
            except OSError:  # it is gone already, or a link to nothing
                continue
            stamps.append(Stamp(text_of(entry.name), stat.st_size, stat.st_mtime_ns))
            changed_ns = max(changed_ns, stat.st_ctime_ns)
    return tuple(sorted(stamps)), changed_ns


def token_of(stamps: Sequence[Stamp], outside: str | None = None) -> str:
    """A short text that changes with any file's name, size or time.

    `outside` is the place of files that do not lie in the inbox, as it is recorded; the text
    changes with it, too.
    """
    return digest_json(stamps if outside is None else [outside, stamps])[:16]


def weights(stamps: Sequence[Stamp]) -> list[str]:
    """The names of the weight files."""
    return [s.name for s in stamps if s.name.endswith(_WEIGHTS)]


def half_replaced(before: Sequence[Stamp], after: Sequence[Stamp]) -> str | None:
    """In a few words, whether some shards of a set are new and others as they were; else None."""
    shards = {s for s in after if is_shard(s.name)}
    old = shards & set(before)
    if not old or old == shards:
        return None
    new = len(shards - old)
    return f"{new} of {len(shards)} shards are new, the others are of the last version"
