"""What the merges by angles mean, on whole tensors in float64 NumPy: vectors, not inner products.

Written from the formulas of mergekit's behaviour, sharing nothing with the core. `row_elems` is the
length of a row where a method may go row by row; without it the tensor is one row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.oracles import Case, Floats


def _slerp(a: Floats, b: Floats, t: float, cosine: float, straight: bool) -> Floats:
    if straight:
        return (1 - t) * a + t * b
    angle = np.arccos(cosine)
    result: Floats = (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)
    return result


def slerp(case: Case) -> Floats:
    """From the base to the one expert; a chord where |cos| > 0.9995."""
    assert case.base is not None
    (expert,) = case.experts
    norms = [n if n > 1e-8 else 1.0 for n in (np.linalg.norm(case.base), np.linalg.norm(expert))]
    cosine = float(np.clip(case.base / norms[0] @ (expert / norms[1]), -1, 1))
    return _slerp(case.base, expert, float(case.params["t"]), cosine, abs(cosine) > 0.9995)


def nuslerp(case: Case, row_elems: int | None = None) -> Floats:
    """Between two experts (or deltas), t = w₂ / (w₁ + w₂); norms are at least 1e-7."""
    first, second = case.column("weight")[:, 0]
    t = 0.5 if abs(first + second) < 1e-6 else second / (first + second)
    if row_elems is None or case.params.get("nuslerp_flatten", True):
        rows = case.deltas[:, None]
    else:
        rows = case.deltas.reshape(2, -1, row_elems)
    merged = []
    for a, b in zip(*rows, strict=True):
        unit_a, unit_b = (v / max(np.linalg.norm(v), 1e-7) for v in (a, b))
        cosine = float(np.clip(unit_a @ unit_b, -1, 1))
        straight = bool(1 - np.float32(cosine) ** 2 <= 1e-16)
        merged.append(_slerp(a, b, t, cosine, straight))
    update = np.concatenate(merged)
    return update if case.base is None else case.base + update


def multislerp(case: Case) -> Floats:
    """Weighted mean direction, its tangent average, the exponential map, the mean length."""
    weight, eps = case.column("weight"), float(case.params.get("eps", 1e-8))
    base = 0.0 if case.base is None else case.base
    if len(weight) == 1:
        alone: Floats = case.experts[0]
        return alone
    if case.params.get("normalize_weights", True):
        weight = weight / weight.sum()
    norms = np.linalg.norm(case.deltas, axis=1, keepdims=True)
    units = case.deltas / (norms + eps)
    mean = (weight * units).sum(0)
    if np.linalg.norm(mean) < max(eps, 1e-7):
        linear: Floats = base + (weight * case.deltas).sum(0)
        return linear
    mean = mean / np.linalg.norm(mean)
    tangent = (weight * (units - (units @ mean)[:, None] * mean)).sum(0)
    step = np.linalg.norm(tangent) + eps
    point = mean * np.cos(step) + tangent * np.sin(step) / step
    merged: Floats = base + point * (weight * norms).sum()
    return merged


def karcher(case: Case) -> Floats:
    """Steps on the sphere from the normalised mean; lengths of all inputs are averaged."""
    max_iter, tol = int(case.params.get("max_iter", 10)), float(case.params.get("tol", 1e-5))
    if len(case.experts) == 1:
        alone: Floats = case.experts[0]
        return alone
    norms = np.linalg.norm(case.experts, axis=1)
    units = case.experts[norms > tol] / norms[norms > tol][:, None]
    if not len(units):
        return np.zeros(case.experts.shape[1])
    mean = units.mean(0)
    mean = units[0] if np.linalg.norm(mean) < tol else mean / np.linalg.norm(mean)
    for _ in range(max_iter):
        tangent = np.zeros_like(mean)
        for unit in units:
            dot = np.clip(mean @ unit, -1, 1)
            angle = np.arccos(dot)
            if tol <= angle <= np.pi - tol:
                tangent += angle / np.sin(angle) * (unit - dot * mean) / len(units)
        step = np.linalg.norm(tangent)
        if step < tol:
            break
        mean = np.cos(step) * mean + np.sin(step) * tangent / step
        mean = mean / np.linalg.norm(mean)
    merged: Floats = mean * norms.mean()
    return merged


def model_stock(case: Case, row_elems: int | None = None) -> Floats:
    """t · mean of the experts + (1 − t) · base, t from the mean cosine of pairs of deltas."""
    assert case.base is not None
    count, numel = case.experts.shape
    width = row_elems if case.params.get("filter_wise", False) and row_elems else numel
    merged = []
    for start in range(0, numel, width):
        row = slice(start, start + width)
        delta, base = case.deltas[:, row], case.base[row]
        lengths = np.linalg.norm(delta, axis=1)
        cosines = [
            np.clip(delta[i] @ delta[j] / max(lengths[i] * lengths[j], 1e-6), -1, 1)
            for i in range(count)
            for j in range(i)
        ]
        cosine = np.mean(cosines)
        divisor = 1 + (count - 1) * cosine
        t = 0.0 if abs(divisor) < 1e-6 else count * cosine / divisor
        merged.append(t * case.experts[:, row].mean(0) + (1 - t) * base)
    return np.concatenate(merged)


#: One oracle per operator of the family, by name.
ORACLES_SPHERICAL: dict[str, Callable[[Case], Floats]] = {
    "slerp": slerp,
    "nuslerp": nuslerp,
    "multislerp": multislerp,
    "karcher": karcher,
    "model_stock": model_stock,
}
