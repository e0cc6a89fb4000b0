"""Closes a trim rule whose cut among ties was left open, by a look at the block of the cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numba
import numpy as np

from mergepipe_pipeline.operators.bits_kernel import Stored, bits_of, value_of
from mergepipe_pipeline.spec.plan import TrimRule

_TILE_ELEMS = 1024
_MAGNITUDE = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of deltas from element `start_elem`: `expert` minus `base`, both [n].

    Bits of bfloat16 (uint16) or float32; without `base`, `expert` are deltas.
    """

    start_elem: int
    expert: Stored
    base: Stored | None = None


def closed(rule: TrimRule, runs: Iterable[Run]) -> TrimRule:
    """The rule that keeps the same and says itself up to which element ties are kept.

    `runs` are what is read of the block, in order; none is asked for after the last tie to keep. If
    they have fewer ties, all of these are kept.
    """
    left = rule.ties_after
    if not left:
        return rule
    bits = np.uint32(rule.threshold_bits)
    for run in runs:
        base = np.empty(0, run.expert.dtype) if run.base is None else run.base
        place, count = _nth_tie(run.expert, base, bits, left)
        if place >= 0:
            return TrimRule(rule.threshold_bits, run.start_elem + place + 1)
        left -= count
    return TrimRule(rule.threshold_bits, rule.ties_until_elem)


@numba.njit(nogil=True, cache=True)
def _nth_tie(expert: Stored, base: Stored, bits: np.uint32, nth: int) -> tuple[int, int]:
    """Place of the `nth` |δ| with these bits, or −1 and how many there are; 0.2 ns per element."""
    left = nth
    for at in range(0, len(expert), _TILE_ELEMS):
        tile, below = expert[at : at + _TILE_ELEMS], base[at : at + _TILE_ELEMS]
        count = _ties(tile, below, bits)
        if count >= left:
            for i in range(len(tile)):
                left -= _ties(tile[i : i + 1], below[i : i + 1], bits)
                if left == 0:
                    return at + i, nth
        left -= count
    return -1, nth - left


@numba.njit(nogil=True, cache=True, inline="always")
def _ties(expert: Stored, base: Stored, bits: np.uint32) -> int:
    count = np.int32(0)
    if len(base):
        for i in range(len(expert)):
            delta = value_of(expert[i]) - value_of(base[i])
            count += np.int32((bits_of(delta) & _MAGNITUDE) == bits)  # type: ignore[call-arg]
    else:
        for i in range(len(expert)):
            delta = value_of(expert[i])
            count += np.int32((bits_of(delta) & _MAGNITUDE) == bits)  # type: ignore[call-arg]
    return int(count)
