"""How far a merge of approximated deltas can be from the full one at most; see `bounds`.

δ̂ has the sign of δ or is zero, and ‖δ − δ̂‖ = ‖r‖ is known, so that |δ̂| ≤ |δ| + |r|. A sum is off
by the residuals of its deltas. A vote or a trim can turn out otherwise for elements that are near:
of one expert at one place, at most the larger of δ and δ̂ is then missing or too much.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.planner.bounds import Bound, Sensitivity, total_bound
from mergepipe_pipeline.planner.candidates import Choice, Group
from mergepipe_pipeline.planner.levels import Levels, LevelTable


def level_bound(
    table: LevelTable, levels: Levels, sensitivities: Mapping[int, Sensitivity]
) -> Bound:
    """The bound for one choice of levels; `sensitivities` by number of the output tensor."""
    residual = np.sqrt(table.residual_sq(levels))
    if not residual.any():
        return Bound(0.0, "nothing is omitted")
    is_near = table.is_near(levels) & (residual > 0)
    rests = ((group, group.table(residual)) for group in table.candidates.groups())
    return total_bound(
        (sensitivity, partial(_of_group, group, sensitivity, rest, group.table(is_near)))
        for group, rest in rests
        if rest.any()
        for sensitivity in (sensitivities[group.tensor],)
    )


def _of_group(group: Group, sensitivity: Sensitivity, rest: F64Array, is_near: Choice) -> float:
    """The square of one output tensor's bound; `rest` [out_blocks, E] is ‖r‖, ‖δ‖ of nothing."""
    touched = np.flatnonzero((rest > 0).any(axis=1))
    rest, is_near = rest[touched], is_near[touched]
    factor = np.abs(group.table(group.candidates.coefficient)[touched])
    norm: F64Array = group.table(group.candidates.norm)[touched]
    # The larger of δ and δ̂, at most.
    either = np.where(is_near, norm + rest, norm)
    if sensitivity.response == "additive":
        # A sum that trims is off by a whole element where only one of both is kept.
        is_sum = np.array([r.is_sum for r in group.rows])
        off = np.where(is_near & ~is_sum, either, rest)
        return float(np.square((factor * off).sum(axis=1)).sum())
    if np.isnan(sensitivity.reach).any():
        # Two votes of one sign differ by what is off, of two signs by deltas of either sign.
        return float(np.square((factor * either).sum(axis=1)).sum())
    return _of_means(group, sensitivity.reach, rest, is_near, np.square(either))


def _of_means(
    group: Group, reach: F64Array, rest: F64Array, is_near: Choice, sq_norm: F64Array
) -> float:
    """As in `bounds`; what is approximated is not limited by what the experts themselves keep."""
    is_part: Choice = np.any((rest == 0) & (sq_norm > 0) | is_near, axis=1)
    total = 0.0
    for i, row in enumerate(group.rows):
        cap = row.kept_sq_norm
        for factor, here in ((2, is_part), (1, ~is_part)):
            near = float(sq_norm[here & is_near[:, i], i].sum())
            exact = min(cap, float(sq_norm[here & ~is_near[:, i], i].sum()))
            total += reach[i] ** 2 * factor * (near + exact)
            cap -= exact
    return total
