"""Cuts among ties that a plan leaves open: each window finds its own, knowing those before it.

A rule keeps the first so many ties of a block. How many a window may keep depends on the windows
before it in that block, so these take turns: to count, not to read or to merge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mergepipe_pipeline.concurrency.sequencer import Sequencer
from mergepipe_pipeline.spec.blocks import clip
from mergepipe_pipeline.spec.plan import ExpertInput, TensorTask, TrimRule

#: An expert's number, and which of its rules: 0 for `trim`, 1 for `outliers`.
Which = tuple[int, int]
#: Place of the nth tie with a threshold's bits of an expert's elements [start, stop), counted from
#: start; or −1, and how many there are.
Find = Callable[[int, int, int, int, int], tuple[int, int]]


class OpenCuts:
    """The open rules of one task; its windows share it. Safe for several threads.

    Of a block that is not read, no tie can be kept: what is there equals the base.
    """

    def __init__(self, task: TensorTask) -> None:
        self._rules = {
            (number, which): rule
            for number, e in enumerate(task.experts)
            for which, rule in enumerate((e.trim, e.outliers))
            if rule is not None and rule.is_open and _changes(e, rule)
        }
        self._left = {which: rule.ties_after for which, rule in self._rules.items()}
        self._sequencers = {
            which: Sequencer(rule.tie_stop_elem) for which, rule in self._rules.items()
        }

    def __bool__(self) -> bool:
        return bool(self._rules)

    def stops(self, start_elem: int, stop_elem: int, find: Find) -> Mapping[Which, int]:
        """Up to which element ties are kept by the rules that are cut in [start, stop).

        Waits for the windows before it in their blocks. Raises CancelledError if the run is being
        left.
        """
        found = {}
        for which, rule in self._rules.items():
            a, b = max(start_elem, rule.tie_stop_elem), min(stop_elem, rule.ties_until_elem)
            if a >= b:
                continue
            self._sequencers[which].wait(a)
            if left := self._left[which]:
                place, count = find(which[0], rule.threshold_bits, a, b, left)
                found[which] = b if place < 0 else a + place + 1
                self._left[which] = left - count if place < 0 else 0
            self._sequencers[which].advance(b)
        return found

    def abandon(self) -> None:
        """Say that the run is being left, so that nobody waits for what will not come."""
        for sequencer in self._sequencers.values():
            sequencer.cancel()


def _changes(e: ExpertInput, rule: TrimRule) -> bool:
    """Whether anything of the expert differs from the base in the block that is cut."""
    return e.view.low_rank is not None or any(
        clip(e.read, rule.tie_stop_elem, rule.ties_until_elem)
    )
