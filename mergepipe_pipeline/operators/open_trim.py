"""Closes a trim rule whose cut among ties was left open, by a look at the block of the cut."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.spec.plan import TrimRule


def closed(rule: TrimRule, runs: Iterable[tuple[int, npt.NDArray[np.float32]]]) -> TrimRule:
    """The rule that keeps the same and says itself up to which element ties are kept.

    `runs` are (first element, δ [n]) of what is read of the block, in order; none is asked for
    after the last tie to keep. If they have fewer ties, all of these are kept.
    """
    left = rule.ties_after
    if not left:
        return rule
    for start_elem, delta in runs:
        ties = np.flatnonzero(np.abs(delta).view(np.uint32) == rule.threshold_bits)
        if left <= len(ties):
            return TrimRule(rule.threshold_bits, start_elem + int(ties[left - 1]) + 1)
        left -= len(ties)
    return TrimRule(rule.threshold_bits, rule.ties_until_elem)
