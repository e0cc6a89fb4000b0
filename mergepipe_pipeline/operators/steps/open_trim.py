"""Closes a trim rule whose cut among ties was left open, by a look at the block of the cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.arrays import F32Array, U16Array
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.domain.ties import TieBreaker


@dataclass(frozen=True, slots=True)
class Run:
    """A run of deltas from element `start_elem`: `expert` minus `base`, both [n].

    Bits of bfloat16 (uint16) or float32; without `base`, `expert` are deltas.
    """

    start_elem: int
    expert: U16Array | F32Array
    base: U16Array | F32Array | None = None


def closed(rule: TrimRule, runs: Iterable[Run]) -> TrimRule:
    """The rule that keeps the same elements and states up to which element ties are kept.

    `runs` cover the part of the block that is read, in order; none is taken after the last tie to
    keep. If they have fewer ties, all of these are kept.
    """
    if not rule.is_open:
        return rule
    from mergepipe_pipeline.operators.kernels.nth_tie import nth_tie

    breaker = TieBreaker(rule)
    for run in runs:

        def find(bits: int, start: int, stop: int, nth: int, run: Run = run) -> tuple[int, int]:
            base = np.empty(0, run.expert.dtype) if run.base is None else run.base
            return nth_tie(run.expert, base, np.uint32(bits), nth)

        stop_elem = breaker.stop_elem(run.start_elem, run.start_elem + len(run.expert), find)
        if stop_elem is not None and not breaker.ties_left:
            return TrimRule(rule.threshold_bits, stop_elem)
    return TrimRule(rule.threshold_bits, rule.ties_until_elem)
