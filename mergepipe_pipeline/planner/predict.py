"""How wrong the merge of a choice of blocks will be, estimated from the catalog's statistics.

An estimate, not a bound: `bounds` holds always, this is near. For sums of deltas it is the norm of
what is left out, from exact norms and the sketches' cosines, with the standard error that sketches
of their width have, and random drops. For other merges it is what a simulation on samples gave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.planner.candidates import Candidates, Choice, Curve, Group
from mergepipe_pipeline.planner.items import cosine_batches
from mergepipe_pipeline.planner.simulation import PARTS

#: Standard errors on either side of an estimate that are stated with it.
STATED_ERRORS = 4
#: Standard errors that a certain difference stands out by; of so few parts, one in a hundred does
#: so by chance.
_CERTAIN = 3
_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True, slots=True)
class Prediction:
    """Estimate of ‖W_plan − W_full‖₂, give or take `margin` (four standard errors).

    Infinite where something that is not finite is left out.

    `margin` is None where a part is no sum of deltas: how far samples or histograms lead astray is
    not stated.
    """

    error: float
    margin: float | None


@dataclass
class _Sums:
    """What one tensor adds, per choice: squared error, its variance, whether that is stated.

    Squares are [choices, PARTS], estimated from one part of the samples each; they are all the same
    where there are none.
    """

    squares: F64Array
    variances: F64Array
    is_stated: Choice


@dataclass(frozen=True, slots=True)
class Trial:
    """What choices give, each tried on the same samples.

    `predictions` are as `predict` has them; `squares` are squared errors [choices, PARTS],
    estimated from one part of the samples each.
    """

    predictions: list[Prediction] | None
    squares: F64Array

    def is_nearer(self, choice: int, rival: int) -> bool:
        """Whether samples show for certain that a choice ends nearer to the full merge.

        Both are tried on the same samples, so that their difference is known better than either.
        """
        first, second = self.squares[choice], self.squares[rival]
        if not np.isfinite([first, second]).all():
            return False
        saved: F64Array = second - first
        chance = saved.std(ddof=1) / math.sqrt(PARTS)
        return bool(saved.mean() > _CERTAIN * chance)


def predict(
    c: Candidates, choices: Sequence[Choice], *, replay: bool = False
) -> list[Prediction] | None:
    """One prediction per choice; None where statistics are missing.

    With `replay` what is simulated is tried as chosen, instead of read off a curve.
    """
    return _predictions(_total(c, choices, replay)) if _has_statistics(c) else None


def try_choices(c: Candidates, choices: Sequence[Choice]) -> Trial:
    """Try choices as chosen, on samples."""
    total = _total(c, choices, replay=True)
    return Trial(_predictions(total) if _has_statistics(c) else None, total.squares)


def _has_statistics(c: Candidates) -> bool:
    return all(r.block_l2sq is not None for r in c.rows)


def _predictions(total: _Sums) -> list[Prediction]:
    squares = total.squares.mean(axis=1).tolist()
    estimates = zip(squares, total.variances.tolist(), total.is_stated.tolist(), strict=True)
    return [
        Prediction(math.sqrt(max(s, 0.0)), _margin(max(s, 0.0), v) if is_stated else None)
        for s, v, is_stated in estimates
    ]


def _total(c: Candidates, choices: Sequence[Choice], replay: bool) -> _Sums:
    """What all tensors add."""
    total = _nothing(len(choices))
    with threadpool_limits(1, "blas"), Workers(threads.PLANNING) as workers:
        for sums in workers.map(lambda group: _of_group(group, choices, replay), c.groups()):
            total.squares += sums.squares
            total.variances += sums.variances
            total.is_stated &= sums.is_stated
    return total


def _nothing(count: int) -> _Sums:
    return _Sums(np.zeros((count, PARTS)), np.zeros(count), np.ones(count, np.bool_))


def _of_group(group: Group, choices: Sequence[Choice], replay: bool) -> _Sums:
    """What one output tensor adds."""
    sums = _nothing(len(choices))
    omitted = [group.omitted(choice) for choice in choices]
    finite: dict[int, Choice] = {}
    for n, missing in enumerate(omitted):
        sums.is_stated[n] = not missing.any() or all(r.is_sum for r in group.rows)
        if not np.isfinite(group.size[missing]).all():
            sums.squares[n], sums.is_stated[n] = np.inf, False
        elif missing.any():
            finite[n] = missing
    if finite and not _add_simulated(group, finite, sums, replay):
        _add_left_out(group, finite, sums)
    return sums


def _add_simulated(group: Group, omitted: Mapping[int, Choice], sums: _Sums, replay: bool) -> bool:
    """Add the squared errors that samples show, per choice; False where there are no samples."""
    c, choices = group.candidates, list(omitted.values())
    if c.simulations is None:
        return False
    squares, curve = None, None if replay else c.curves.get(group.tensor)
    if replay:
        squares = c.simulations.squares(group.tensor, choices)
    elif curve:
        squares = np.array([[_simulated(group, choice, curve)] for choice in choices])
    if squares is None:
        return False
    sums.squares[list(omitted)] += squares
    return True


def _add_left_out(group: Group, omitted: Mapping[int, Choice], sums: _Sums) -> None:
    """Add ‖Σ omitted cδ‖² and the variance of that estimate, per choice."""
    from mergepipe_pipeline.planner.compiled import quadratic

    for batch, cosine in cosine_batches(group, cautious=False):
        kept = group.kept[batch]
        for n, choice in omitted.items():
            size = np.where(choice[batch], group.size[batch], 0.0)
            sq_norm, mean = np.square(size) * kept, size * kept
            mean_sq, variance = np.zeros(len(size)), np.zeros(len(size))
            quadratic(cosine, mean, mean_sq, variance)
            # What is kept on average; what a random drop makes of it is orthogonal to the rest.
            sums.squares[n] += float((mean_sq + (sq_norm - np.square(mean)).sum(axis=1)).sum())
            sums.variances[n] += (variance + _of_drops(group, batch, sq_norm, mean_sq)).sum()


def _margin(square: float, variance: float) -> float:
    """How far √square may be off if the square is off by the stated number of standard errors."""
    off = STATED_ERRORS * math.sqrt(variance)
    above = math.sqrt(square + off) - math.sqrt(square)
    return max(above, math.sqrt(square) - math.sqrt(max(square - off, 0.0)))


def _of_drops(group: Group, batch: slice, sq_norm: F64Array, mean_sq: F64Array) -> F64Array:
    """Variance per output block that random drops give at most; `mean_sq`: their mean, squared."""
    keep = np.array([r.keep for r in group.rows])
    if (keep == 1).all():
        return np.zeros(len(sq_norm))
    block, numel = group.candidates.grid.block_elems, max(r.numel for r in group.rows)
    out_blocks = np.arange(group.n_out_blocks)[batch]
    lengths = np.minimum(block, numel - block * out_blocks)
    spread = (sq_norm * (1 - keep)).sum(axis=1)
    own = (np.square(sq_norm) * (1 - keep) / np.maximum(keep, _TINY)).sum(axis=1)
    peak = max(r.kurtosis for r in group.rows)
    mixed = 4 * np.maximum(mean_sq, 0.0) * spread + 2 * np.square(spread)
    variance: F64Array = peak / lengths * (mixed + own)
    return variance


def _simulated(group: Group, omitted: Choice, curve: Curve) -> float:
    sq_norm: F64Array = group.table(group.candidates.sq_norm)
    total = sq_norm.sum(axis=1)
    missing = np.where(omitted, sq_norm, 0.0).sum(axis=1)
    is_known = total > 0
    share = 1 - missing[is_known] / total[is_known]
    return float(
        (curve.factor * total[is_known] * np.interp(share, curve.share, curve.residual)).sum()
    )
