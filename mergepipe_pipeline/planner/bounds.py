"""How far a budgeted merge can be from the full one, from statistics alone.

The bound is on ‖W_plan − W_full‖₂ in exact arithmetic, before the cast on write. Blocks are
disjoint, so squares add over sites (same elements of one merged tensor); inside a site the triangle
inequality adds the experts. Sign votes are bounded by what either vote can reach.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.planner.candidates import Candidates
from mergepipe_pipeline.planner.strategies import Choice
from mergepipe_pipeline.spec.operator import Response

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Bound:
    """`value` in L2 norm, or None where nothing is known; `note` names the argument used."""

    value: float | None
    note: str


def error_bound(
    c: Candidates, chosen: Choice, response: Response, vote_reach: Floats, negative: Choice
) -> Bound:
    """The bound for one plan.

    Per candidate, ‖cδ‖ bounds what leaving it out changes. Per row: `vote_reach` is λ·(rescale)
    where the tensor's vote is normalised, else NaN; `negative` marks normalised votes with a
    negative weight, whose divisor can vanish, so that no bound exists.
    """
    omitted = ~chosen & ~c.zero
    if not omitted.any():
        return Bound(0.0, "nothing is omitted")
    size = np.where(c.zero, 0.0, np.abs(c.coefficient) * np.where(c.zero, 0.0, c.norm))
    if response == "additive":
        return Bound(_root(_per_site(c, np.where(omitted, size, 0.0))), "triangle inequality")
    if response == "unbounded":
        return Bound(None, "what is read in one place changes the result in others")
    if negative[c.row[omitted]].any():
        return Bound(None, "a normalised sign vote with negative weights has no bound")

    touched = _per_site(c, omitted.astype(np.float64)) > 0
    reach = vote_reach[c.row]
    mean_site = _per_site(c, np.isfinite(reach).astype(np.float64)) > 0
    as_sum = _per_site(c, size) + _per_site(c, np.where(chosen, size, 0.0))
    as_mean = _mean_reach(c, reach, ~c.zero) + _mean_reach(c, reach, chosen)
    worst = np.where(mean_site, as_mean, as_sum)
    return Bound(_root(worst[touched]), "reach of both sign votes")


def update_norm(c: Candidates) -> float:
    """sqrt(Σ‖cᵢδᵢ‖²): the norm of the full update if deltas are orthogonal."""
    known = np.isfinite(c.norm)
    return math.sqrt(float(np.square(c.coefficient[known] * c.norm[known]).sum()))


def _mean_reach(c: Candidates, reach: Floats, taken: Choice) -> Floats:
    """Per site, the largest L2 norm of a weighted mean of the taken deltas.

    Per element |mean| ≤ maxᵢ sᵢ|δᵢ| ≤ sqrt(Σ sᵢ²δᵢ²), hence per site the square root of the summed
    energies, and also sqrt(n)·maxᵢ sᵢ‖δᵢ‖∞; the smaller of the two.
    """
    use = taken & ~c.zero & np.isfinite(reach)
    energy = np.zeros(len(use))
    energy[use] = np.square(reach[use] * c.norm[use])
    peak, width = np.zeros(c.n_sites), np.zeros(c.n_sites)
    np.maximum.at(peak, c.site[use], reach[use] * c.max_abs[use])
    np.maximum.at(width, c.site, c.nelems)
    result: Floats = np.minimum(np.sqrt(_per_site(c, energy)), np.sqrt(width) * peak)
    return result


def _per_site(c: Candidates, values: Floats) -> Floats:
    summed: Floats = np.bincount(c.site, weights=values, minlength=c.n_sites).astype(np.float64)
    return summed


def _root(values: Floats) -> float:
    return math.sqrt(float(np.square(values).sum()))
