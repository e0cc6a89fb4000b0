"""Looking ahead: yields each item with the items that were newly seen before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def lookahead(items: Iterable[T], count: int) -> Iterator[tuple[T, list[T]]]:
    """Items in order, each with the items first seen since the one before it.

    `count` items after the one that is given have been seen. Every item is seen once, so that a
    caller can announce it to the disk before its own turn.
    """
    waiting: deque[T] = deque()
    seen: list[T] = []
    for item in items:
        waiting.append(item)
        seen.append(item)
        if len(waiting) > count:
            yield waiting.popleft(), seen
            seen = []
    for item in waiting:
        yield item, seen
        seen = []
