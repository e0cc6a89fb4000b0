"""How far a merge under a plan can be from the full one at most, from statistics alone.

The bound is on ‖W_plan − W_full‖₂ in exact arithmetic, before the cast on write, and always holds.
Blocks are disjoint, so squares add over output blocks (the same elements of one merged tensor).

What is read of a delta is δ̂, nothing, an approximation or δ itself. ‖δ − δ̂‖ = ‖r‖ is known, so
that |δ̂| ≤ |δ| + |r|. A sum is off by the residuals of its deltas. A vote or a trim can turn out
otherwise for elements that are approximated: of one expert at one place, at most the larger of δ
and δ̂ is then missing or too much, or both where their signs differ, and then |δ| + |δ̂| = |r|.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.domain.operator import Response
from mergepipe_pipeline.planner.candidates import Choice, Group
from mergepipe_pipeline.planner.levels import Levels, LevelTable


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


#: Why there is no bound, and what is added where deltas are approximated.
_ELSEWHERE = "what is read in one place changes the result in others"
_AS_READ = "; ranks and norms are those of deltas as they are read"
#: What each argument is called.
_NOTES: dict[Response, str] = {
    "additive": "triangle inequality",
    "vote": "reach of the sign votes",
    "mean": "reach of the means",
}


def error_bound(
    table: LevelTable, levels: Levels, sensitivities: Mapping[int, Sensitivity]
) -> Bound:
    """Return the bound of a choice; `sensitivities` are by number of the output tensor."""
    residual = np.sqrt(table.residual_sq(levels))  # [candidates], as is_near
    # δ − Lδ̂ = Lr + (1 − L)δ, where δ̂ is read L times as long.
    lengths = table.lengths(levels)
    other = lengths != 1
    norm = np.abs(1 - lengths[other]) * table.candidates.norm[other]
    residual[other] = lengths[other] * residual[other] + norm
    if not residual.any():
        return Bound(0.0, "nothing is omitted")
    is_near = table.is_near(levels) & (residual > 0)
    square, notes = 0.0, set()
    for group in table.candidates.groups():
        leftover = group.table(residual)  # [out_blocks, E]
        if not leftover.any():
            continue
        sensitivity = sensitivities[group.tensor]
        if sensitivity.response == "unbounded":
            return Bound(None, _ELSEWHERE + (_AS_READ if group.table(is_near).any() else ""))
        if sensitivity.has_divisor_zero:
            return Bound(None, "a normalised sign vote with negative weights has no bound")
        notes.add(_NOTES[sensitivity.response])
        square += _of_group(group, sensitivity, leftover, group.table(is_near))
    if not math.isfinite(square):
        return Bound(None, "an expert holds NaN or infinity where something is left out")
    return Bound(math.sqrt(square), " and ".join(sorted(notes)))


def _of_group(group: Group, sensitivity: Sensitivity, leftover: F64Array, is_near: Choice) -> float:
    """The square of one output tensor's bound; `leftover` [out_blocks, E] is ‖r‖."""
    touched = np.flatnonzero((leftover > 0).any(axis=1))
    leftover, is_near = leftover[touched], is_near[touched]  # [touched, E], as all below
    factor = np.abs(group.table(group.candidates.coefficient)[touched])
    norm: F64Array = group.table(group.candidates.norm)[touched]
    # The larger of δ and δ̂, at most.
    either = np.where(is_near, norm + leftover, norm)
    if sensitivity.response == "additive":
        # A sum that trims is off by a whole element where only one of both is kept.
        is_sum = np.array([r.is_sum for r in group.rows])
        off = np.where(is_near & ~is_sum, either, leftover)
        return float(np.square((factor * off).sum(axis=1)).sum())
    if np.isnan(sensitivity.reach).any():
        # Two votes of one sign differ by what is off, of two signs by deltas of either sign.
        return float(np.square((factor * either).sum(axis=1)).sum())
    return _of_means(group, sensitivity.reach, leftover, is_near, np.square(either))


def _of_means(
    group: Group, reach: F64Array, leftover: F64Array, is_near: Choice, sq_norm: F64Array
) -> float:
    """A mean m of kept deltas x has m² ≤ max x² ≤ Σx², element by element.

    Where nothing is read the error is the full mean. Elsewhere it is the difference of two means:
    no more than the larger, or than that of means m and n of disjoint sets of deltas, for which
    (m − n)² ≤ 2m² + 2n² ≤ 2Σx². An expert can be in both if the signs of δ and δ̂ differ: then
    δ² + δ̂² ≤ r². All blocks of an expert together keep at most its `kept_sq_norm`,
    which does not limit what is approximated.
    """
    is_part: Choice = np.any((leftover == 0) & (sq_norm > 0) | is_near, axis=1)  # [touched]
    total, cap = 0.0, np.array([row.kept_sq_norm for row in group.rows])  # [E], as both below
    with np.errstate(invalid="ignore"):  # of infinities
        for factor, here in ((2, is_part), (1, ~is_part)):
            near = sq_norm.sum(axis=0, where=here[:, None] & is_near)
            exact = np.minimum(cap, sq_norm.sum(axis=0, where=here[:, None] & ~is_near))
            total += float((reach**2 * factor * (near + exact)).sum())
            cap -= exact
    return total
