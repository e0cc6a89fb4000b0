"""Ties that a plan leaves open: each window breaks its own, knowing how many are left to keep.

A rule keeps the first so many ties of a block. How many a window may keep depends on the windows
before it in that block. They wait for each other to count, not to read or to merge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.concurrency.workers import Sequencer
from mergepipe_pipeline.domain.blocks import clip
from mergepipe_pipeline.domain.plan import ExpertInput, TensorTask, TrimRule
from mergepipe_pipeline.operators.kernels.bits import Stored, subtract, times
from mergepipe_pipeline.operators.kernels.merge_tiles import ABSENT, STORED, TILE_ELEMS

#: An expert's number, and which of its rules: 0 for `trim`, 1 for `outliers`.
RuleKey = tuple[int, int]
#: Given an expert's number, the threshold's bits, elements [start, stop) and n: the place of the
#: nth tie, counted from start, and n; or −1 where there are fewer, and how many there are.
FindTie = Callable[[int, int, int, int, int], tuple[int, int]]


@dataclass
class _OpenRule:
    """A rule, how many of its ties are left to keep, and how far its block is counted."""

    rule: TrimRule
    left: int
    counted: Sequencer


class TieBreakers:
    """The open rules of one task; its windows share it. Safe for several threads.

    Of a block that is not read, no tie can be kept: its elements equal the base.
    """

    def __init__(self, task: TensorTask) -> None:
        self._rules = {
            (number, which): _OpenRule(rule, rule.ties_after, Sequencer(rule.tie_stop_elem))
            for number, e in enumerate(task.experts)
            for which, rule in enumerate((e.trim, e.outliers))
            if rule is not None and rule.is_open and _changes(e, rule)
        }

    def __bool__(self) -> bool:
        return bool(self._rules)

    def stops(self, start_elem: int, stop_elem: int, find: FindTie) -> Mapping[RuleKey, int]:
        """Up to which element ties are kept, of each rule that keeps some in [start, stop).

        Waits for the windows before it in their blocks. Raises CancelledError if `cancel` is
        called.
        """
        stop_by_rule = {}
        for key, ties in self._rules.items():
            rule = ties.rule
            a, b = max(start_elem, rule.tie_stop_elem), min(stop_elem, rule.ties_until_elem)
            if a >= b:
                continue
            ties.counted.wait(a)
            if ties.left:
                place, count = find(key[0], rule.threshold_bits, a, b, ties.left)
                # Too few ties: all are kept, and the next window is looked at.
                stop_by_rule[key] = b if place < 0 else a + place + 1
                ties.left -= count
            ties.counted.advance(b)
        return stop_by_rule

    def cancel(self) -> None:
        """End the waiting of all windows, because the run ends."""
        for ties in self._rules.values():
            ties.counted.cancel()


def _changes(e: ExpertInput, rule: TrimRule) -> bool:
    """Whether anything of the expert differs from the base in the rule's block."""
    return e.view.low_rank is not None or any(
        clip(e.differing, rule.tie_stop_elem, rule.ties_until_elem)
    )


def with_stops(task: TensorTask, stops: Mapping[RuleKey, int]) -> TensorTask:
    """The task with trims that say up to which element ties are kept."""
    experts = list(task.experts)
    for (number, which), stop in stops.items():
        e = experts[number]
        rule = e.outliers if which else e.trim
        assert rule is not None
        closed = TrimRule(rule.threshold_bits, stop)
        experts[number] = replace(e, outliers=closed) if which else replace(e, trim=closed)
    return replace(task, experts=tuple(experts))


def nth_in(expert: Stored, base: Stored | None, bits: int, nth: int) -> tuple[int, int]:
    """Find a tie (see `FindTie`) in elements of an expert less those of a base."""
    from mergepipe_pipeline.operators.kernels.nth_tie import nth_tie

    base_elems = np.empty(0, expert.dtype) if base is None else base
    place, count = nth_tie(expert, base_elems, np.uint32(bits), nth)
    return int(place), int(count)


def deltas_of(row: Stored, base: Stored | None, start_elem: int, steps: F32Array) -> F32Array:
    """δ [n] of a part of an expert's row, from `start_elem` on; `steps` are of its tiles."""
    delta = np.zeros(len(row), np.float32)
    first = start_elem // TILE_ELEMS
    for tile, step in enumerate(steps, first):
        at = slice(max(0, tile * TILE_ELEMS - start_elem), (tile + 1) * TILE_ELEMS - start_elem)
        if step == STORED:
            base_elems = np.zeros_like(row[at]) if base is None else base[at]
            subtract(row[at], base_elems, delta[at])
        elif step != ABSENT:
            times(row[at], step, delta[at])
    return delta
