"""Cuts among ties that a plan leaves open: each window finds its own, knowing those before it.

A rule keeps the first so many ties of a block. How many a window may keep depends on the windows
before it, so they take turns in the order of their elements: to count, not to read or to merge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from threading import Condition

from mergepipe_pipeline.spec.plan import TensorTask

#: An expert's number, and which of its rules: 0 for `trim`, 1 for `outliers`.
Which = tuple[int, int]
#: Place of the nth tie with a threshold's bits of an expert's elements [start, stop), counted from
#: start; or −1, and how many there are.
Find = Callable[[int, int, int, int, int], tuple[int, int]]


class OpenCuts:
    """The open rules of one task; its windows share it. Safe for several threads."""

    def __init__(self, task: TensorTask) -> None:
        self._rules = {
            (number, which): rule
            for number, e in enumerate(task.experts)
            for which, rule in enumerate((e.trim, e.outliers))
            if rule is not None and rule.is_open
        }
        self._left = {which: rule.ties_after for which, rule in self._rules.items()}
        self._turn, self._reached, self._is_abandoned = Condition(), 0, False

    def __bool__(self) -> bool:
        return bool(self._rules)

    def stops(self, start_elem: int, stop_elem: int, find: Find) -> Mapping[Which, int]:
        """Up to which element ties are kept by the rules that are cut in [start, stop).

        Waits for the windows before it. Raises CancelledError if one of them has failed.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._reached == start_elem or self._is_abandoned)
            if self._is_abandoned:
                raise CancelledError
            found = {}
            for which, rule in self._rules.items():
                a, b = max(start_elem, rule.tie_stop_elem), min(stop_elem, rule.ties_until_elem)
                left = self._left[which]
                if a < b and left:
                    place, count = find(which[0], rule.threshold_bits, a, b, left)
                    found[which] = b if place < 0 else a + place + 1
                    self._left[which] = left - count if place < 0 else 0
            self._reached = stop_elem
            self._turn.notify_all()
        return found

    def abandon(self) -> None:
        """Say that a window failed, so that nobody waits for it."""
        with self._turn:
            self._is_abandoned = True
            self._turn.notify_all()
