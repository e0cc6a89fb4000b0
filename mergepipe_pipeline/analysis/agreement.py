"""How deltas of one tensor agree, estimated from sketches and samples, as sums that add up.

Between the catalog's statistics and `conflicts`. No weight is read. Errors of blocks are
independent, so variances add over blocks and tensors, and shares of many blocks are known better
than those of one.

An inner product is that of two sketches, corrected by what the same sketches make of the two norms,
which are known: P − β(Q − ‖a‖‖b‖), Q the mean of the sketches' squared norms scaled to ‖a‖‖b‖. For
a fixed β that is unbiased whatever the deltas are. β = 2ρ/(1 + ρ²) makes the variance least,
(‖a‖‖b‖)²(1 − ρ²)²/(1 + ρ²)/width, and the result exact for equal deltas. β comes from the cosine ρ
of all of the tensor's sketches, so that it hardly depends on the block that it corrects. The
variances are those of normal sketches; those of ±1 signs are never larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from mergepipe_pipeline.arrays import F64Array, U16Array
from mergepipe_pipeline.domain.stats import SAMPLE_WIDTH, SKETCH_WIDTH, TensorStats, widened

#: How far bfloat16 sketches turn a cosine, at most; blocks do not average it out.
_ROUNDING = 2.0**-18
#: Floats of one batch of per-block matrices in memory.
_BATCH_ELEMS = 1 << 22


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
    """What adds up over tensors, for K experts.

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
        """Of the tensors of both."""
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
    norms = np.zeros((blocks, len(stats)))
    sketches = np.zeros((blocks, len(stats), SKETCH_WIDTH))
    samples = np.zeros((len(stats), blocks, SAMPLE_WIDTH), np.uint16)
    for i, t in enumerate(stats):
        if t is not None:
            finite = np.isfinite(t.block_l2sq)
            n = len(finite)
            norms[:n, i] = np.sqrt(np.where(finite, t.block_l2sq, 0.0))
            sketches[:n, i] = np.where(finite[:, None], widened(t.block_sketch), 0.0)
            samples[i, :n] = np.where(finite[:, None], t.block_sample, 0)
    starts = np.arange(blocks) * block_elems
    lengths = np.minimum(block_elems, max(t.numel for t in present) - starts)
    inner, inner_var, sum_var = _inner(norms, sketches)
    return Sums(inner, inner_var, sum_var, *_counts(samples, lengths / SAMPLE_WIDTH))


def _inner(norms: F64Array, sketches: F64Array) -> tuple[F64Array, F64Array, float]:
    """`inner`, `inner_var` and `sum_var` from `norms` [B, K] and `sketches` [B, K, width]."""
    sizes = np.linalg.norm(sketches, axis=2)
    flat = sketches.transpose(1, 0, 2).reshape(norms.shape[1], -1)
    products = flat @ flat.T
    size = np.sqrt(np.diagonal(products))
    cosine = _ratio(products, np.outer(size, size))
    beta = 2 * cosine / (1 + np.square(cosine))
    seen = _ratio(np.square(sizes), norms).T @ norms
    inner = products - beta * ((seen + seen.T) / 2 - norms.T @ norms)
    inner_var, sum_var = _variances(norms, _ratio(sketches, sizes[:, :, None]), beta)
    np.fill_diagonal(inner_var, 0.0)
    np.fill_diagonal(inner, np.square(norms).sum(axis=0))
    return inner, inner_var, sum_var


def _variances(norms: F64Array, directions: F64Array, beta: F64Array) -> tuple[F64Array, float]:
    """Variances of inner products and of their sum, from unit sketches `directions` [B, K, width].

    The sum is tr(CS) of the sketches' products S with C = 11ᵀ − diag(Σⱼ βᵢⱼ‖j‖/‖i‖), and tr(CS) has
    the variance 2 tr(CGCG)/width, G the true products. With S in place of G that trace would come
    out too large by what is taken off again (the mean of a Wishart matrix' quadratic form).
    """
    count = norms.shape[1]
    squares, products, crossed = (np.zeros((count, count)) for _ in range(3))
    trace = 0.0
    corrections = _ratio(norms @ beta.T, norms)
    step = max(1, _BATCH_ELEMS // count**2)
    for at in range(0, len(norms), step):
        part = slice(at, at + step)
        scale = norms[part, :, None] * norms[part, None, :]
        gram = scale * (directions[part] @ directions[part].transpose(0, 2, 1))
        squares += np.square(scale).sum(axis=0)
        products += np.square(gram).sum(axis=0)
        crossed += (scale * gram).sum(axis=0)
        turned = gram.sum(axis=1, keepdims=True) - corrections[part, :, None] * gram
        first = np.einsum("bii->b", turned)
        second = np.einsum("bij,bji->b", turned, turned)
        unbiased = (second - np.square(first) / SKETCH_WIDTH) / (1 + 1 / SKETCH_WIDTH)
        trace += float(unbiased.sum())
    inner_var = (1 + np.square(beta)) * (squares + products) - 4 * beta * crossed
    return np.maximum(inner_var, 0.0) / SKETCH_WIDTH, max(0.0, 2 * trace / SKETCH_WIDTH)


def _counts(
    samples: U16Array, stands_for: F64Array
) -> tuple[F64Array, F64Array, F64Array, float, float]:
    """`same`, `both`, `both_sq`, `drawn`, `drawn_sq` from bfloat16 bits [K, B, SAMPLE_WIDTH].

    Each of block b's samples stands for `stands_for[b]` elements.
    """
    weights = np.repeat(stands_for, SAMPLE_WIDTH)
    bits = samples.reshape(len(samples), -1)
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
