"""What every merge method means, on whole tensors in float64 NumPy: the judge of the code.

Written from the formulas of mergekit's behaviour, sharing nothing with the core. Oracles see whole
tensors at once, find thresholds by sorting and sum over K as NumPy likes; the code may do neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Value = float | bool | str


@dataclass(frozen=True)
class Case:
    """One tensor to merge: `base` [N] or None, `experts` [K, N] as values (never deltas).

    `shape` is the tensor's, (N,) if not given. `keep` [K, N] is what a random drop of density
    below 1 keeps; or `uniforms` [K, N] say so, random numbers in [0, 1): an element is kept where
    its number is below its probability. `scales` [K] overrides the L1 rescale factors.
    """

    base: Floats | None
    experts: Floats
    params: Mapping[str, Value]
    model_params: Sequence[Mapping[str, Value]]
    keep: Bools | None = None
    scales: Floats | None = None
    shape: tuple[int, ...] = ()
    uniforms: Floats | None = None

    @property
    def deltas(self) -> Floats:
        """δ [K, N]; the values themselves without a base."""
        return self.experts if self.base is None else self.experts - self.base

    @property
    def row(self) -> int:
        """Length of the tensor's last dimension."""
        return self.shape[-1] if self.shape else self.experts.shape[1]

    def column(self, name: str, default: float | None = None) -> Floats:
        """A per-model parameter as [K, 1]; KeyError if a required one is missing."""
        rows = self.model_params
        values = [m[name] if default is None else m.get(name, default) for m in rows]
        return np.array(values, dtype=np.float64)[:, None]


def largest(size: Floats, count: int) -> Bools:
    """The `count` largest of a tensor; among equals the lowest index first."""
    keep = np.zeros(size.shape, dtype=bool)
    keep[np.argsort(-size, kind="stable")[: max(count, 0)]] = True
    return keep


def trim_keep(delta: Floats, density: float) -> Bools:
    """The int(density · N) largest magnitudes of a tensor, at least one; none for density 0."""
    if density >= 1:
        return np.ones(delta.shape, dtype=bool)
    return largest(np.abs(delta), 0 if density <= 0 else max(1, int(density * delta.size)))


def band_keep(delta: Floats, density: float, gamma: float) -> Bools:
    """int(density · N) magnitudes below the int(gamma · N) largest, or below as many as leave so
    many; among equals the lowest index counts as larger."""
    if density >= 1:
        return np.ones(delta.shape, dtype=bool)
    n, kept = delta.size, max(0, int(density * delta.size))
    above = min(int(gamma * n), n - kept)
    return largest(np.abs(delta), kept + above) & ~largest(np.abs(delta), above)


def rank_probability(delta: Floats, row: int, density: float, epsilon: float) -> Floats:
    """density − ε for the smallest magnitude of a row of length `row`, to density + ε, by rank."""
    if density >= 1 or density <= 0:
        return np.full(delta.shape, float(density >= 1))
    order = np.argsort(np.abs(delta).reshape(-1, row), axis=1, kind="stable")
    rank = np.empty(order.shape)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(row), order.shape), axis=1)
    share = rank / (row - 1) if row > 1 else rank + 0.5
    result: Floats = (density + epsilon * (2 * share - 1)).reshape(-1)
    return result


def l1_scale(delta: Floats, keep: Bools) -> float:
    """‖δ‖₁ / ‖kept δ‖₁, or 1 if either is below 1e-7."""
    whole, kept = np.abs(delta).sum(), np.abs(delta[keep]).sum()
    return float(whole / kept) if min(whole, kept) >= 1e-7 else 1.0


def linear(case: Case) -> Floats:
    """Σ wᵢTᵢ, over Σ wᵢ when normalize (default true)."""
    weight = case.column("weight")
    total = (weight * case.experts).sum(0)
    result: Floats = total / weight.sum() if case.params.get("normalize", True) else total
    return result


def passthrough(case: Case) -> Floats:
    """The one model's values times its scale (default 1)."""
    (value,) = case.column("scale", 1.0) * case.experts
    return np.asarray(value)


def _family(
    case: Case,
    *,
    probability: Floats,
    keep: Bools,
    consensus: bool,
    normalize: bool,
    rescale: bool,
    paper_scale: bool = False,
) -> Floats:
    assert case.base is not None
    weight, density = case.column("weight"), case.column("density", 1.0)
    paper = case.params.get("variant", "mergekit") == "paper"
    delta = np.where(keep, case.deltas, 0.0)
    if case.params.get("rescale", rescale):
        if paper and paper_scale:
            delta = delta / np.where(probability > 0, probability, 1.0)
        else:
            found = [l1_scale(d, k) for d, k in zip(case.deltas, keep, strict=True)]
            scales = np.array(found) if case.scales is None else case.scales
            delta = delta * np.where(density >= 1, 1.0, scales[:, None])
    if paper and not paper_scale:
        weight = np.ones_like(weight)
    delta = weight * delta
    if consensus:
        match = elected(delta)
        mix = (delta * match).sum(0)
        divisor = (weight * match).sum(0)
        divisor = np.where(divisor == 0, 1.0, divisor)
    else:
        mix = delta.sum(0)
        divisor = weight.sum()
        divisor = 1.0 if abs(divisor) < 1e-8 else divisor
    if case.params.get("normalize", normalize):
        mix = mix / divisor
    merged: Floats = case.base + case.params.get("lambda", 1.0) * mix
    return merged


def elected(delta: Floats) -> Bools:
    """Where a delta [K, N] has the sign of the sum over K; zero sums are positive, zeros have no
    sign."""
    match: Bools = np.sign(delta) == np.where(delta.sum(0) >= 0, 1.0, -1.0)
    return match


def trimmed(case: Case) -> Bools:
    """What a magnitude trim keeps, [K, N]."""
    rows = zip(case.deltas, case.column("density", 1.0)[:, 0], strict=True)
    return np.stack([trim_keep(delta, density) for delta, density in rows])


def banded(case: Case) -> Bools:
    """What breadcrumbs keeps, [K, N]."""
    density, gamma = case.column("density", 1.0)[:, 0], case.column("gamma", 0.01)[:, 0]
    rows = zip(case.deltas, density, gamma, strict=True)
    return np.stack([band_keep(*row) for row in rows])


def dare_probability(case: Case) -> Floats:
    """Each element's probability to be kept by DARE, [K, N]."""
    density = case.column("density", 1.0).clip(0, 1)
    return np.broadcast_to(density, case.experts.shape)


def della_probability(case: Case) -> Floats:
    """Each element's probability to be kept by DELLA, [K, N]."""
    density, epsilon = case.column("density", 1.0)[:, 0], case.column("epsilon", 0.15)[:, 0]
    rows = zip(case.deltas, density, epsilon, strict=True)
    return np.stack([rank_probability(d, case.row, p, e) for d, p, e in rows])


def dropped(case: Case, probability: Floats) -> Bools:
    """What a random drop keeps, [K, N]."""
    if case.keep is not None:
        return case.keep | (probability >= 1)
    if case.uniforms is not None:
        return case.uniforms < probability
    assert np.isin(probability, (0.0, 1.0)).all()
    return probability > 0


def _by_magnitude(case: Case, keep: Bools, *, consensus: bool, normalize: bool) -> Floats:
    return _family(
        case,
        probability=keep.astype(np.float64),
        keep=keep,
        consensus=consensus,
        normalize=normalize,
        rescale=False,
    )


def _at_random(
    case: Case, probability: Floats, *, consensus: bool, normalize: bool = False
) -> Floats:
    return _family(
        case,
        probability=probability,
        keep=dropped(case, probability),
        consensus=consensus,
        normalize=normalize,
        rescale=True,
        paper_scale=True,
    )


def task_arithmetic(case: Case) -> Floats:
    """B + λ Σ wᵢδᵢ, not normalised by default."""
    everything = np.ones(case.experts.shape, dtype=bool)
    return _by_magnitude(case, everything, consensus=False, normalize=False)


def ties(case: Case) -> Floats:
    """Magnitude trim per tensor, sign vote (weighted, or the paper's without weights), normalised
    by default."""
    return _by_magnitude(case, trimmed(case), consensus=True, normalize=True)


def breadcrumbs(case: Case) -> Floats:
    """Trim of small magnitudes and outliers, weighted sum, not normalised by default."""
    return _by_magnitude(case, banded(case), consensus=False, normalize=False)


def breadcrumbs_ties(case: Case) -> Floats:
    """Trim of small magnitudes and outliers, weighted sign vote, not normalised by default."""
    return _by_magnitude(case, banded(case), consensus=True, normalize=False)


def dare_linear(case: Case) -> Floats:
    """Random drop, L1 rescale (or the paper's 1/density) by default, weighted sum."""
    return _at_random(case, dare_probability(case), consensus=False)


def dare_ties(case: Case) -> Floats:
    """Random drop, rescale as dare_linear, weighted sign vote, not normalised by default."""
    return _at_random(case, dare_probability(case), consensus=True)


def della(case: Case) -> Floats:
    """Random drop by rank in rows, L1 rescale (or the paper's 1/p), sign vote, normalised."""
    return _at_random(case, della_probability(case), consensus=True, normalize=True)


def della_linear(case: Case) -> Floats:
    """Random drop by rank in rows, rescale as della, weighted sum, not normalised by default."""
    return _at_random(case, della_probability(case), consensus=False)


def sce(case: Case) -> Floats:
    """Variance selection, energies as weights, sign vote without weights, weighted mean."""
    assert case.base is not None
    delta, topk = case.deltas, float(case.params.get("select_topk", 1.0))
    if topk < 1:
        pairs = np.square(delta[:, None] - delta[None]).sum((0, 1))
        variance = pairs / (2 * len(delta) ** 2)  # no mean: zero, exactly, where all are equal
        delta = delta * largest(variance, int(np.count_nonzero(variance) * topk))
    energy = np.square(delta).mean(1)
    total = energy.sum()
    weight = energy / total if total >= 1e-6 else np.full(len(energy), 1 / len(energy))
    share = weight[:, None] * elected(delta)
    merged: Floats = case.base + (delta * share).sum(0) / share.sum(0).clip(1e-6)
    return merged


def importance(case: Case) -> Floats:
    """|δ|·KL(softmax T ‖ softmax B) by rows, with 1e-8 on every probability, [N]."""
    assert case.base is not None

    def softmax(values: Floats) -> Floats:
        rows = values.reshape(-1, case.row)
        powers = np.exp(rows - rows.max(1, keepdims=True))
        return np.asarray(powers / powers.sum(1, keepdims=True) + 1e-8)

    p, q = softmax(case.experts[0]), softmax(case.base)
    divergence = (p * np.log(p / q)).sum(1, keepdims=True).clip(0)
    rows = np.abs(case.deltas[0]).reshape(-1, case.row)
    return np.asarray(rows * divergence).reshape(-1)


def arcee_threshold(score: Floats) -> float:
    """median + 1.5·(q₃ − q₁), quantiles at rank int(q·(N − 1))."""
    ordered = np.sort(score)
    q1, q2, q3 = (ordered[int(q * (score.size - 1))] for q in (0.25, 0.5, 0.75))
    return float(q2 + 1.5 * (q3 - q1))


def arcee_fusion(case: Case) -> Floats:
    """B plus the delta where its importance reaches the threshold."""
    assert case.base is not None
    score = importance(case)
    merged: Floats = case.base + case.deltas[0] * (score >= arcee_threshold(score))
    return merged


def mean(case: Case) -> Floats:
    """Σ Tᵢ / n, of fractions."""
    columns = (map(Fraction, column.tolist()) for column in case.experts.T)
    return np.array([float(sum(column) / len(case.experts)) for column in columns])


def nearswap(case: Case) -> Floats:
    """w·T + (1 − w)·B with w = clamp(t / max(|B − T|, 1e-6), 0, 1)."""
    assert case.base is not None
    far = np.abs(case.deltas[0]).clip(1e-6)
    w = (float(case.params["t"]) / far).clip(0, 1)
    merged: Floats = w * case.experts[0] + (1 - w) * case.base
    return merged


def _ram(case: Case, factor: Callable[[Floats, Floats], Floats]) -> Floats:
    assert case.base is not None
    changed = np.abs(case.deltas) > float(case.params.get("epsilon", 1e-5))
    count = changed.sum(0)
    shared = (changed & (count > 1)).sum(1).astype(np.float64)
    alone = (changed & (count == 1)).sum(1).astype(np.float64)
    delta = np.where(changed, case.deltas, 0.0)
    lone = np.where(count == 1, delta, 0.0) * factor(shared, alone)[:, None]
    mean = np.where(count > 1, delta, 0.0).sum(0) / count.clip(1)
    merged: Floats = case.base + lone.sum(0) + mean
    return merged


def ram(case: Case) -> Floats:
    """The lone change, or the mean of the changes (|δ| above epsilon)."""
    return _ram(case, lambda shared, alone: np.ones_like(alone))


def ramplus_tl(case: Case) -> Floats:
    """As ram, a lone change times 1 + r·clamp(shared / alone, 0, alpha) of its expert."""
    r, alpha = float(case.params.get("r", 0.1)), float(case.params.get("alpha", 0.2))
    least = float(case.params.get("epsilon", 1e-5))

    def factor(shared: Floats, alone: Floats) -> Floats:
        return 1 + r * np.minimum(np.maximum(shared / np.maximum(alone, least), 0), alpha)

    return _ram(case, factor)


#: One oracle per registered operator; the conformance suite asks for it by name.
ORACLES: dict[str, Callable[[Case], Floats]] = {
    "linear": linear,
    "mean": mean,
    "passthrough": passthrough,
    "task_arithmetic": task_arithmetic,
    "ties": ties,
    "breadcrumbs": breadcrumbs,
    "breadcrumbs_ties": breadcrumbs_ties,
    "dare_linear": dare_linear,
    "dare_ties": dare_ties,
    "della": della,
    "della_linear": della_linear,
    "sce": sce,
    "arcee_fusion": arcee_fusion,
    "nearswap": nearswap,
    "ram": ram,
    "ramplus_tl": ramplus_tl,
}
