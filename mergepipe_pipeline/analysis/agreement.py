"""How deltas of one tensor agree, estimated from samples, as sums that add up.

Between the catalog's statistics and `conflict_report`. No weight is read. Errors of tensors are
independent, so variances add, and shares of many samples are known better than those of few.

Norms are exact, so an inner product is ‖a‖‖b‖ times the cosine ρ of both samples, which is exact
for equal deltas. Its variance is that of a ratio: the sum of squares of what each sample adds to it
(the delta method). Where few samples hold most of a delta, n in effect (Kish: the squared sum of
their squares over the sum of their fourth powers), what was not seen may weigh as much as what was:
then it is (1 − ρ² + 1/n)/n² more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from mergepipe_pipeline.arrays import F32Array, F64Array, U16Array
from mergepipe_pipeline.domain.stats import SAMPLE_WIDTH, TensorStats, widened

#: How far bfloat16 samples turn a cosine, at most; blocks do not average it out.
_ROUNDING = 2.0**-18


@dataclass(frozen=True, slots=True)
class Agreement:
    """How K deltas agree in some place; each `*_error` is one standard error.

    `norms` [K], exact. [K, K]: `cosine`, 0 with a delta that is zero; `overlap`, the share of
    elements that both change; `sign_agreement`, the share of those that both move the same way, NaN
    where none was seen. `interference` is of the plain sum (all coefficients 1): the share of
    Σ‖δ‖² that it loses, 1 − ‖Σδ‖²/Σ‖δ‖²: 0 for orthogonal deltas, below 0 where they add up.
    """

    norms: F64Array
    cosine: F64Array
    cosine_error: F64Array
    overlap: F64Array
    overlap_error: F64Array
    sign_agreement: F64Array
    sign_error: F64Array
    interference: float
    interference_error: float


@dataclass(frozen=True, slots=True)
class Sums:
    """Figures that add up over tensors, for K experts.

    `inner` [K, K]: inner products, exact on the diagonal, and their variances; `sum_var`: the
    variance of ‖Σδ‖², which is all of `inner` added. `same`, `both` [K, K]: elements that both
    change, `same` of them the same way. `drawn`: elements that samples stand for. Each sampled
    element counts as often as elements that it stands for; `*_sq` sum the squares of these counts.
    """

    inner: F64Array
    inner_var: F64Array
    sum_var: float
    same: F64Array
    both: F64Array
    both_sq: F64Array
    drawn: float
    drawn_sq: float

    def __add__(self, other: Sums) -> Sums:
        """Return the sums of the tensors of both."""
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Sums)))

    def agreement(self) -> Agreement:
        """The figures that follow."""
        norms_sq = np.diagonal(self.inner)
        norms, total, count = np.sqrt(norms_sq), float(norms_sq.sum()), len(norms_sq)
        scale = np.outer(norms, norms)
        apart = (scale > 0) & ~np.eye(count, dtype=bool)
        error = np.where(apart, _ratio(np.sqrt(self.inner_var), scale) + _ROUNDING, 0.0)
        overlap, overlap_error = _share(self.both, np.array(self.drawn), np.array(self.drawn_sq))
        sign, sign_error = _share(self.same, self.both, self.both_sq)
        interferes = total > 0 and count > 1
        return Agreement(
            norms=norms,
            cosine=np.clip(_ratio(self.inner, scale), -1.0, 1.0),
            cosine_error=error,
            overlap=overlap,
            overlap_error=overlap_error,
            sign_agreement=sign,
            sign_error=sign_error,
            interference=1.0 - float(self.inner.sum()) / total if interferes else 0.0,
            interference_error=self.sum_var**0.5 / total + count * _ROUNDING if interferes else 0.0,
        )


def sums_of(stats: Sequence[TensorStats | None], block_elems: int) -> Sums:
    """The sums of one tensor of the base; None for an expert that does not change it.

    An expert's tensor that ends early is unchanged beyond its end, and so is, for this purpose, a
    block in which something is not finite.
    """
    present = [t for t in stats if t is not None]
    blocks = max(len(t.block_l2sq) for t in present)
    norms_sq = np.zeros(len(stats))
    samples = np.zeros((len(stats), blocks, SAMPLE_WIDTH), np.uint16)
    for i, t in enumerate(stats):
        if t is not None:
            finite = np.isfinite(t.block_l2sq)  # [blocks of this expert]
            norms_sq[i] = t.block_l2sq[finite].sum()
            samples[i, : len(finite)] = np.where(finite[:, None], t.block_sample, 0)
    starts = np.arange(blocks) * block_elems
    lengths = np.minimum(block_elems, max(t.numel for t in present) - starts)
    weights = np.repeat(lengths / SAMPLE_WIDTH, SAMPLE_WIDTH)  # [samples]: elements of each
    bits = samples.reshape(len(stats), -1)  # [K, samples]
    inner, inner_var, sum_var = _inner(np.sqrt(norms_sq), widened(bits), weights)
    return Sums(inner, inner_var, sum_var, *_counts(bits, weights))


def _inner(
    norms: F64Array, samples: F32Array, weights: F64Array
) -> tuple[F64Array, F64Array, float]:
    """`inner`, `inner_var` and `sum_var` from `norms` [K] and `samples` [K, samples]."""
    wide = samples.astype(np.float64)
    sizes = np.sqrt(np.square(wide) @ weights)  # [K]
    unit = _ratio(wide, sizes[:, None])  # [K, samples], of norm 1 with these weights
    cosine = (unit * weights) @ unit.T  # [K, K], as all below
    squares, heavy = np.square(unit), np.square(weights)
    second, third = (squares * heavy) @ squares.T, (squares * unit * heavy) @ unit.T
    fourth = np.diagonal(second)  # [K]: one over the samples that count, 0 without any
    ends = fourth[:, None] + fourth + 2 * second
    by_sample = second - cosine * (third + third.T) + np.square(cosine) * ends / 4
    few = np.maximum.outer(*[np.where(sizes > 0, fourth, 1.0)] * 2)
    unseen = np.square(few) * (1 - np.square(cosine) + few)
    scale = np.outer(norms, norms)
    inner_var = np.square(scale) * (np.maximum(by_sample, 0.0) + unseen)
    np.fill_diagonal(inner_var, 0.0)
    # What each sample adds to ‖Σδ‖², less its share of the norms that are known.
    each = norms[:, None] * unit  # [K, samples]
    added = np.square(each.sum(axis=0)) - (cosine @ norms * norms) @ squares  # [samples]
    np.fill_diagonal(unseen, 0.0)
    sum_var = float(heavy @ np.square(added)) + 2 * float((np.square(scale) * unseen).sum())
    inner = cosine * scale
    np.fill_diagonal(inner, np.square(norms))
    return inner, inner_var, sum_var


def _counts(bits: U16Array, weights: F64Array) -> tuple[F64Array, F64Array, F64Array, float, float]:
    """`same`, `both`, `both_sq`, `drawn`, `drawn_sq` from bfloat16 bits [K, samples].

    Each sample stands for so many elements as `weights` [samples] say.
    """
    changed = ((bits & 0x7FFF) != 0).astype(np.float64)
    signs = np.where(bits >> 15, -changed, changed)
    both = (changed * weights) @ changed.T
    both_sq = (changed * np.square(weights)) @ changed.T
    same = (both + (signs * weights) @ signs.T) / 2
    return same, both, both_sq, float(weights.sum()), float(np.square(weights).sum())


def _share(part: F64Array, whole: F64Array, whole_sq: F64Array) -> tuple[F64Array, F64Array]:
    """The share of `part` in `whole`, NaN where that is 0, and its standard error.

    The error is that around the share with two successes and two failures added (Agresti and Coull
    1998), plus how far that is away: never 0, as n samples that all agree leave doubt.
    """
    share = np.where(whole > 0, _ratio(part, whole), np.nan)
    drawn = _ratio(np.square(whole), whole_sq)
    likely = (np.nan_to_num(share) * drawn + 2) / (drawn + 4)
    error = np.hypot(np.sqrt(likely * (1 - likely) / (drawn + 4)), likely - np.nan_to_num(share))
    return share, np.where(np.isnan(share), np.nan, error)


def _ratio(a: F64Array, b: F64Array) -> F64Array:
    """a / b, 0 where b is 0."""
    a, b = np.broadcast_arrays(a, b)
    return np.divide(a, b, out=np.zeros(a.shape), where=b > 0)
