"""Windows of a tensor: runs of elements that are read, merged and written together."""

from __future__ import annotations

from collections.abc import Iterator


def cut(numel: int, window_elems: int) -> Iterator[tuple[int, int]]:
    """Half-open element ranges that cover a tensor in order."""
    for start in range(0, numel, window_elems):
        yield start, min(numel, start + window_elems)
