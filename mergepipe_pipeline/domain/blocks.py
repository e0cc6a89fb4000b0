"""Blocks: a block is a fixed-size run of a tensor's elements, the unit that a budget buys.

Blocks never cross tensors. The grid decides what can be bought, never what is computed: results at
full budget do not depend on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

MIN_BLOCK_ELEMS = 4096
MAX_BLOCK_ELEMS = 1 << 20

Range = tuple[int, int]
_STOP = itemgetter(1)


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """Cuts a tensor of `numel` elements into blocks of `block_elems` (the last may be shorter)."""

    block_elems: int

    def __post_init__(self) -> None:
        n = self.block_elems
        if not MIN_BLOCK_ELEMS <= n <= MAX_BLOCK_ELEMS or n & (n - 1):
            raise ValueError(
                f"block_elems must be a power of two in [{MIN_BLOCK_ELEMS}, "
                f"{MAX_BLOCK_ELEMS}], not {n}"
            )

    def count(self, numel: int) -> int:
        """Number of blocks of a tensor with `numel` elements."""
        return -(-numel // self.block_elems)

    def range_of(self, block: int, numel: int) -> Range:
        """Half-open element range of block number `block`."""
        return block * self.block_elems, min(numel, (block + 1) * self.block_elems)

    @staticmethod
    def for_numel(total_elems: int) -> BlockGrid:
        """The default grid of a checkpoint: about 4096 blocks of 4 Ki to 1 Mi elements."""
        target = max(1, total_elems // 4096)
        return BlockGrid(min(MAX_BLOCK_ELEMS, max(MIN_BLOCK_ELEMS, 1 << (target - 1).bit_length())))


def coalesce(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Half-open ranges sorted, touching and overlapping ones joined, empty ones gone."""
    out: list[Range] = []
    for start, stop in sorted(r for r in ranges if r[1] > r[0]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return tuple(out)


def clip(ranges: Sequence[Range], start: int, stop: int) -> Iterator[Range]:
    """The parts of sorted, disjoint `ranges` inside [start, stop)."""
    for number in range(bisect_right(ranges, start, key=_STOP), len(ranges)):
        a, b = ranges[number]
        if a >= stop:
            break
        yield max(a, start), min(b, stop)


def total_elems(ranges: Iterable[Range]) -> int:
    """Elements covered by disjoint ranges."""
    return sum(b - a for a, b in ranges)
