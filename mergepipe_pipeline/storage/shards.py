"""What the names of shards tell: `model-00001-of-00002.safetensors` is one of two."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def is_shard(name: str) -> bool:
    """Whether a file's name says that it is one of several."""
    return _SHARD.fullmatch(name) is not None


def missing_shard(names: Iterable[str], present: Iterable[str]) -> str | None:
    """The first file that the names of others ask for and that is not present; None if all are."""
    there = set(present)
    sets = {(m["stem"], m["count"]) for name in names if (m := _SHARD.fullmatch(name))}
    for stem, count in sorted(sets):
        for number in range(1, int(count) + 1):
            name = f"{stem}-{number:05d}-of-{count}.safetensors"
            if name not in there:
                return name
    return None
