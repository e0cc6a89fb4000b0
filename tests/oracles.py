"""What every merge method means, on whole tensors in float64 NumPy: the judge of the code.

Written from the formulas of mergekit's behaviour, sharing nothing with the core. Oracles see whole
tensors at once, find thresholds by sorting and sum over K as NumPy likes; the code may do neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Value = float | bool


@dataclass(frozen=True)
class Case:
    """One tensor to merge: `base` [N] or None, `experts` [K, N] as values (never deltas).

    `keep` [K, N] is what DARE keeps. `scales` [K] overrides the L1 rescale factors.
    """

    base: Floats | None
    experts: Floats
    params: Mapping[str, Value]
    model_params: Sequence[Mapping[str, Value]]
    keep: Bools | None = None
    scales: Floats | None = None

    @property
    def deltas(self) -> Floats:
        """δ [K, N]; the values themselves without a base."""
        return self.experts if self.base is None else self.experts - self.base

    def column(self, name: str, default: float | None = None) -> Floats:
        """A per-model parameter as [K, 1]; KeyError if a required one is missing."""
        rows = self.model_params
        values = [m[name] if default is None else m.get(name, default) for m in rows]
        return np.array(values, dtype=np.float64)[:, None]


def trim_keep(delta: Floats, density: float) -> Bools:
    """The int(density · N) largest magnitudes of a tensor; among equals the lowest index first."""
    if density >= 1:
        return np.ones(delta.shape, dtype=bool)
    order = np.argsort(-np.abs(delta), kind="stable")
    keep = np.zeros(delta.shape, dtype=bool)
    keep[order[: int(density * delta.size)]] = True
    return keep


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


def _family(
    case: Case,
    *,
    keep: Bools,
    consensus: bool,
    normalize: bool,
    rescale: bool,
) -> Floats:
    assert case.base is not None
    weight, density = case.column("weight"), case.column("density", 1.0)
    delta = np.where(keep, case.deltas, 0.0)
    if case.params.get("rescale", rescale):
        found = [l1_scale(d, k) for d, k in zip(case.deltas, keep, strict=True)]
        scales = np.array(found) if case.scales is None else case.scales
        delta = delta * np.where(density >= 1, 1.0, scales[:, None])
    delta = weight * delta
    if consensus:
        sign = np.where(delta.sum(0) >= 0, 1.0, -1.0)
        match = np.sign(delta) == sign
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


def _trimmed(case: Case) -> Bools:
    rows = zip(case.deltas, case.column("density", 1.0)[:, 0], strict=True)
    return np.stack([trim_keep(delta, density) for delta, density in rows])


def _dropped(case: Case) -> Bools:
    assert case.keep is not None
    return case.keep | (case.column("density", 1.0) >= 1)


def task_arithmetic(case: Case) -> Floats:
    """B + λ Σ wᵢδᵢ, not normalised by default."""
    everything = np.ones(case.experts.shape, dtype=bool)
    return _family(case, keep=everything, consensus=False, normalize=False, rescale=False)


def ties(case: Case) -> Floats:
    """Magnitude trim per tensor, weighted sign vote, normalised by default."""
    return _family(case, keep=_trimmed(case), consensus=True, normalize=True, rescale=False)


def dare_linear(case: Case) -> Floats:
    """Given mask, L1 rescale by default, weighted sum."""
    return _family(case, keep=_dropped(case), consensus=False, normalize=False, rescale=True)


def dare_ties(case: Case) -> Floats:
    """Given mask, L1 rescale by default, weighted sign vote, not normalised by default."""
    return _family(case, keep=_dropped(case), consensus=True, normalize=False, rescale=True)


#: One oracle per registered operator; the conformance suite asks for it by name.
ORACLES: dict[str, Callable[[Case], Floats]] = {
    "linear": linear,
    "task_arithmetic": task_arithmetic,
    "ties": ties,
    "dare_linear": dare_linear,
    "dare_ties": dare_ties,
}
