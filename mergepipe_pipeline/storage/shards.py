"""What the names of shards say: `model-00001-of-00002.safetensors` is one of two."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def is_shard(name: str) -> bool:
    """Whether a file's name says that it is one of several."""
    return _SHARD.fullmatch(name) is not None


def missing_shard(names: Iterable[str], present: Iterable[str]) -> tuple[str, int, int] | None:
    """The first file that the names of other shards imply and that is not present.

    With it, how many of its set are present and how many there must be. None if all are.
    """
    present_names = set(present)
    sets = {(m["stem"], m["count"]) for name in names if (m := _SHARD.fullmatch(name))}
    for stem, count in sorted(sets):
        expected = (f"{stem}-{n:05d}-of-{count}.safetensors" for n in range(1, int(count) + 1))
        missing = [name for name in expected if name not in present_names]
        if missing:
            return missing[0], int(count) - len(missing), int(count)
    return None
