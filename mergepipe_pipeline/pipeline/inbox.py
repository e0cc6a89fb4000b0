"""The inbox: which experts have landed, and whether they are whole.

Half-uploaded folders are the normal case. A folder counts once every file that its index names is
there at full length and nothing in it changed for a quiet period.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.storage.checkpoint import is_complete
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Landed:
    """One folder of the inbox: `token` changes with any file's name, size or mtime.

    `waiting` says in one sentence why it is not taken yet, or is None.
    """

    name: str
    token: str
    waiting: str | None


def scan_inbox(home: Warehouse, quiet_s: float) -> tuple[Landed, ...]:
    """Every expert folder of the inbox, in name order; folders starting with a dot are skipped."""
    found = []
    now_ns = time.time_ns()
    for folder in sorted(p for p in home.inbox.iterdir() if p.is_dir() and p.name[0] not in "._"):
        with open_source(str(folder)) as source:
            stats = [(f, source.size(f), source.mtime_ns(f)) for f in source.list()]
        age_s = (now_ns - max((s[2] for s in stats), default=now_ns)) / 1e9
        waiting = is_complete(str(folder))
        if waiting is None and age_s < quiet_s:
            waiting = (
                f"its files changed {age_s:.0f} s ago; it is taken after {quiet_s:.0f} s of quiet"
            )
        found.append(Landed(folder.name, digest_json(stats)[:16], waiting))
    return tuple(found)
