"""Lists every |δ| that occurs in a window, block by block, while the window is described.

Almost every difference of two close bfloat16 numbers is one itself: its lower 16 bits are zero, so
that the histogram of the upper ones says all of it. The others are set aside one by one while they
are few; where they are not, as in float32, nothing is listed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mergepipe_pipeline.arrays import I32Array, I64Array, U32Array
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.stats import HIST_SHIFT, Magnitudes
from mergepipe_pipeline.jit import cached_njit

#: Half of float32's patterns: signs are left out.
BINS = 1 << (32 - HIST_SHIFT - 1)
#: Of so many elements of a block, one may be set aside.
_OFTEN = 4
_GROUP = 128
#: Magnitudes have 31 bits: three digits.
_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS


class Room(NamedTuple):
    """Room for the magnitudes of a window of whole blocks, as `domain.stats.Magnitudes` has them.

    `aside` [2, m + 2] is for the m elements that one block may set aside; `lost` [1] says how many
    blocks had more.
    """

    edges: I64Array
    bits: U32Array
    counts: U32Array
    aside: U32Array
    lost: I64Array

    def listed(self) -> Magnitudes | None:
        """Return what was filled in; None if too many were to be set aside."""
        n = int(self.edges[-1])
        if self.lost[0]:
            return None
        return Magnitudes(self.edges, self.bits[:n].copy(), self.counts[:n].copy())


def room_for(numel: int, grid: BlockGrid) -> Room:
    """Room for a window of so many elements. What is not touched of it costs nothing."""
    blocks, aside = grid.count(numel), grid.block_elems // _OFTEN
    most = blocks * min(BINS + aside, grid.block_elems)
    return Room(
        np.zeros(blocks + 1, np.int64),
        np.empty(most, np.uint32),
        np.empty(most, np.uint32),
        np.empty((2, aside + 2), np.uint32),
        np.zeros(1, np.int64),
    )


@cached_njit(nogil=True)
def end_block(
    block: int,
    n_aside: int,
    even: I32Array,
    odd: I32Array,
    top: int,
    histogram: I64Array,
    room: Room,
) -> None:
    """Empty both tables, of which the bins up to `top` may be occupied, into `histogram` [BINS].

    Fills in the block's magnitudes, if there was room for all `n_aside` of them.
    """
    is_listed = n_aside < room.aside.shape[1] - 2
    room.lost[0] += not is_listed
    rest = _sorted(room.aside[0, : n_aside if is_listed else 0], room.aside[1])
    at, r = room.edges[block], 0
    for start in range(0, top + 1, _GROUP):
        e, o = even[start : start + _GROUP], odd[start : start + _GROUP]
        some = np.int32(0)
        for i in range(_GROUP):
            some |= e[i] | o[i]
        if some == 0:
            continue
        for i in range(_GROUP):
            n = e[i] + o[i]
            if n:
                histogram[start + i] += n
                if is_listed:
                    at, r = _list_bin(start + i, n, rest, r, at, room)
        e[:] = 0
        o[:] = 0
    room.edges[block + 1] = at


@cached_njit(nogil=True)
def _list_bin(bin_: int, n: int, rest: U32Array, r: int, at: int, room: Room) -> tuple[int, int]:
    """List the n elements of a bin, of which those from `rest[r]` on were set aside."""
    stop = r
    while stop < len(rest) and rest[stop] >> HIST_SHIFT == bin_:
        stop += 1
    exact = n - (stop - r)
    if exact and bin_:
        room.bits[at], room.counts[at] = bin_ << HIST_SHIFT, exact
        at += 1
    for i in range(r, stop):
        if i > r and rest[i] == rest[i - 1]:
            room.counts[at - 1] += 1
        else:
            room.bits[at], room.counts[at] = rest[i], 1
            at += 1
    return at, stop


@cached_njit(nogil=True)
def _sorted(values: U32Array, room: U32Array) -> U32Array:
    """`values` in order, sorted digit by digit: several times as fast here as by comparing."""
    n, counts = len(values), np.empty(_DIGITS, np.int32)
    spare, last = room[:n], np.uint32(_DIGITS - 1)
    for shift in range(0, 31 if n else 0, _DIGIT_BITS):
        counts[:] = 0
        for i in range(n):
            counts[(values[i] >> np.uint32(shift)) & last] += 1
        smaller = 0
        for digit in range(_DIGITS):
            counts[digit], smaller = smaller, smaller + counts[digit]
        for i in range(n):
            digit = (values[i] >> np.uint32(shift)) & last
            spare[counts[digit]] = values[i]
            counts[digit] += 1
        values, spare = spare, values
    return values
