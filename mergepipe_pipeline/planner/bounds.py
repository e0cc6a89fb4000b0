"""How far a budgeted merge can be from the full one at most, from statistics alone.

The bound is on ‖W_plan − W_full‖₂ in exact arithmetic, before the cast on write, and always holds.
Blocks are disjoint, so squares add over output blocks (the same elements of one merged tensor).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.domain.operator import Response
from mergepipe_pipeline.planner.candidates import Candidates, Choice, Group


@dataclass(frozen=True)
class Bound:
    """`value` in L2 norm, or None where nothing is known; `note` names the argument used."""

    value: float | None
    note: str


@dataclass(frozen=True)
class Sensitivity:
    """How one output tensor responds to what is left out.

    `reach` [E], for a normalised vote or mean: what a kept delta is multiplied by at most; NaN for
    sums. `has_divisor_zero`: a normalised vote with a negative weight, whose divisor can vanish.
    """

    response: Response
    reach: F64Array
    has_divisor_zero: bool


#: What each argument is called.
_NOTES: dict[Response, str] = {
    "additive": "triangle inequality",
    "vote": "reach of the sign votes",
    "mean": "reach of the means",
}


def error_bound(c: Candidates, chosen: Choice, sensitivities: dict[int, Sensitivity]) -> Bound:
    """The bound for one plan; `sensitivities` by number of the output tensor."""
    if (chosen | c.zero).all():
        return Bound(0.0, "nothing is omitted")
    omitted = ((group, group.omitted(chosen)) for group in c.groups())
    return total_bound(
        (sensitivity, partial(_of_group, group, sensitivity, choice))
        for group, choice in omitted
        if choice.any()
        for sensitivity in (sensitivities[group.tensor],)
    )


def total_bound(parts: Iterable[tuple[Sensitivity, Callable[[], float]]]) -> Bound:
    """The bound over output tensors of which something is left out, given the square of each."""
    square, notes = 0.0, set()
    for sensitivity, squared in parts:
        if sensitivity.response == "unbounded":
            return Bound(None, "what is read in one place changes the result in others")
        if sensitivity.has_divisor_zero:
            return Bound(None, "a normalised sign vote with negative weights has no bound")
        notes.add(_NOTES[sensitivity.response])
        square += squared()
    if not math.isfinite(square):
        return Bound(None, "an expert holds NaN or infinity where something is left out")
    return Bound(math.sqrt(square), " and ".join(sorted(notes)))


def _of_group(group: Group, sensitivity: Sensitivity, omitted: Choice) -> float:
    """The square of the bound for one output tensor."""
    touched: Choice = np.any(omitted, axis=1)
    size, omitted = np.abs(group.size[touched]), omitted[touched]
    if sensitivity.response == "additive":
        return float(np.square(np.where(omitted, size, 0.0).sum(axis=1)).sum())
    if np.isnan(sensitivity.reach).any():
        # Two votes of one sign differ by what is omitted, of two signs by deltas of either sign.
        return float(np.square(size.sum(axis=1)).sum())
    return _of_means(group, sensitivity.reach, touched, omitted)


def _of_means(group: Group, reach: F64Array, touched: Choice, omitted: Choice) -> float:
    """A mean m of kept deltas x has m² ≤ max x² ≤ Σx², element by element.

    Where nothing is read the error is the full mean. Elsewhere it is the difference of two means:
    no more than the larger, or than that of means m and n of disjoint sets of deltas, for which
    (m − n)² ≤ 2m² + 2n² ≤ 2Σx². All blocks of an expert together keep at most its `kept_sq_norm`.
    """
    sq_norm = np.square(group.table(group.candidates.norm)[touched])
    is_part = (~omitted & (sq_norm > 0)).any(axis=1)
    total = 0.0
    for i, row in enumerate(group.rows):
        cap = row.kept_sq_norm
        for factor, here in ((2, is_part), (1, ~is_part)):
            part = min(cap, float(sq_norm[here, i].sum()))
            total += reach[i] ** 2 * factor * part
            cap -= part
    return total
