"""The inbox: which experts have landed, and whether they are whole.

Half-uploaded folders are the normal case. A folder counts once every file that its index names is
there at full length and nothing in it changed for a quiet period. A folder that cannot be taken
says why, and stops no other.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import NAME
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.storage.checkpoint import is_complete
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Landed:
    """One folder of the inbox: `token` changes with any file's name, size or mtime.

    `waiting` says in one sentence why it is not taken yet, or is None. In `name`, bytes that are no
    UTF-8 are shown as escapes; such a folder always waits.
    """

    name: str
    token: str
    waiting: str | None


def scan_inbox(home: Warehouse, quiet_s: float) -> tuple[Landed, ...]:
    """Every expert folder of the inbox, in name order.

    Files and folders starting with a dot or an underscore are skipped; a link counts as the folder
    it leads to, also where that is gone.
    """
    now_ns = time.time_ns()
    folders = sorted(p for p in home.inbox.iterdir() if p.name[0] not in "._" and _is_folder(p))
    return tuple(_landed(folder, quiet_s, now_ns) for folder in folders)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir() or (path.is_symlink() and not path.exists())
    except OSError:  # a link to where this user may not look
        return True


def _landed(folder: Path, quiet_s: float, now_ns: int) -> Landed:
    name = text_of(folder.name)
    if not NAME.fullmatch(folder.name):
        return Landed(name, digest_json(name)[:16], f"{name!r} cannot be a name in the catalog")
    try:
        stamps = _stamps(folder)
        waiting = is_complete(str(folder))
    except OSError as error:
        return Landed(name, digest_json(str(error))[:16], f"it cannot be read: {error.strerror}")
    age_s = (now_ns - max((s[2] for s in stamps), default=now_ns)) / 1e9
    if waiting is None and age_s < quiet_s:
        waiting = f"its files changed {age_s:.0f} s ago; it is taken after {quiet_s:.0f} s of quiet"
    return Landed(name, digest_json(stamps)[:16], waiting)


def _stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size in bytes and mtime of all in a folder but folders; of links, what they lead to."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_dir():
                    continue
                stat = entry.stat()
            except OSError:  # it is gone already, or a link to nothing
                continue
            found.append((text_of(entry.name), stat.st_size, stat.st_mtime_ns))
    return sorted(found)
