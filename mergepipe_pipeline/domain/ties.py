"""Which ties at a threshold an open trim rule keeps: the first so many, counted in order."""

from __future__ import annotations

from collections.abc import Callable

from mergepipe_pipeline.domain.plan import TrimRule

#: Given the threshold's bits, elements [start, stop) and n: the place of the nth tie, counted from
#: start, and n; or −1 where there are fewer, and how many there are.
FindTie = Callable[[int, int, int, int], tuple[int, int]]


class TieBreaker:
    """Counts the ties of one rule over runs of elements, which must come in order."""

    def __init__(self, rule: TrimRule) -> None:
        self._bits, self.ties_left = rule.threshold_bits, rule.ties_after

    def stop_elem(self, start_elem: int, stop_elem: int, find: FindTie) -> int | None:
        """Up to which element of [start, stop) ties are kept; None where none is left to keep."""
        if not self.ties_left:
            return None
        place, count = find(self._bits, start_elem, stop_elem, self.ties_left)
        if place < 0:  # too few ties in this run: all are kept, and the next run is looked at
            self.ties_left -= count
            return stop_elem
        self.ties_left = 0
        return start_elem + place + 1
