"""The arithmetic of `fused`, compiled: a window of bfloat16 or float32 in, one pass, float32 out.

Works in tiles that stay in the cache, so that a window is read once from memory, whatever the
number of experts. Measured per element and expert on one core: sums 0.12 ns, ties 0.25 and dare
0.37 with inputs in the cache; 0.3, 0.4 and 0.6 for 20 experts from memory; torch, an operation at a
time, 2.2 to 9 ns. Every operation rounds as its torch counterpart does, so the bits are those of
`Operator.apply`.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.operators.kernels.bits import Floats, Stored, fma, value_of
from mergepipe_pipeline.operators.kernels.uniforms import fill_uniforms

Ints = npt.NDArray[np.int64]

#: Elements that are worked on at once.
TILE_ELEMS = 2048
_ONE, _ZERO = np.float32(1), np.float32(0)


@numba.njit(nogil=True, cache=True)
def merge_update(
    base: Stored,
    experts: Stored,
    numbers: Ints,
    places: Ints,
    spans: Ints,
    start_elem: int,
    steps: npt.NDArray[np.bool_],
    thresholds: Floats,
    least: Floats,
    tie_stops: Ints,
    streams: npt.NDArray[np.uint64],
    below: npt.NDArray[np.uint32],
    factors: Floats,
    is_vote: bool,
    normalize: bool,
    divisor: np.float32,
    minus_lambda: np.float32,
    out: Floats,
) -> None:
    """Fill `out` [n] with B + λ · the sum, or the vote, of what the steps leave of the deltas."""
    count, n = len(numbers), len(out)
    deltas = np.empty((count if is_vote else 1, TILE_ELEMS), np.float32)
    b, x = np.empty(TILE_ELEMS, np.float32), np.empty(TILE_ELEMS, np.float32)
    total, share = np.empty(TILE_ELEMS, np.float32), np.empty(TILE_ELEMS, np.float32)
    drawn = np.empty(TILE_ELEMS, np.uint32)
    here = np.empty(count, np.int64)
    for at in range(0, n, TILE_ELEMS):
        m = min(TILE_ELEMS, n - at)
        _widen(base[at : at + m], b)
        total[:m] = 0
        n_here = 0
        for i in range(count):
            if at < spans[places[i], 0] or at >= spans[places[i], 1]:
                continue
            here[n_here] = i
            n_here += 1
            k, d = numbers[i], deltas[i if is_vote else 0]
            is_delta, trims, drops_outliers, draws = steps[k]
            scale, over, weight = factors[k]
            if not (is_delta or drops_outliers or (trims and draws)) and over == 1:
                # The usual steps in one pass; what follows goes through `d` step by step.
                stored = experts[places[i], at : at + m]
                if draws:
                    fill_uniforms(streams[k], start_elem + at, drawn[:m])
                    _add_drawn(stored, b, drawn, below[k], scale, weight, d, total)
                elif trims:
                    cut = min(max(tie_stops[k, 0] - start_elem - at, 0), m)
                    _add_large(stored[:cut], b, least[k, 0], scale, weight, d, total)
                    _add_large(
                        stored[cut:], b[cut:], least[k, 1], scale, weight, d[cut:], total[cut:]
                    )
                else:
                    _add_plain(stored, b, scale, weight, d, total)
                continue
            _widen(experts[places[i], at : at + m], d)
            if not is_delta:
                for e in range(m):
                    d[e] -= b[e]
            if trims:
                cut = min(max(tie_stops[k, 0] - start_elem - at, 0), m)
                limit = thresholds[k, 0]
                for e in range(cut):
                    d[e] *= _ONE if abs(d[e]) >= limit else _ZERO
                for e in range(cut, m):
                    d[e] *= _ONE if abs(d[e]) > limit else _ZERO
            if drops_outliers:
                cut = min(max(tie_stops[k, 1] - start_elem - at, 0), m)
                limit = thresholds[k, 1]
                for e in range(cut):
                    d[e] *= _ONE if abs(d[e]) < limit else _ZERO
                for e in range(cut, m):
                    d[e] *= _ONE if abs(d[e]) <= limit else _ZERO
            if draws:
                fill_uniforms(streams[k], start_elem + at, drawn[:m])
                for e in range(m):
                    d[e] *= _ONE if drawn[e] < below[k] else _ZERO
            if scale != 1:
                for e in range(m):
                    d[e] *= scale
            if over != 1:
                for e in range(m):
                    d[e] /= over
            for e in range(m):
                d[e] *= weight
                total[e] += d[e]
        if is_vote:
            for e in range(m):
                x[e] = _ONE if total[e] >= 0 else -_ONE
                total[e] = 0
                share[e] = 0
            for j in range(n_here):
                i = here[j]
                d, weight = deltas[i], factors[numbers[i], 2]
                for e in range(m):
                    agreeing = d[e] * x[e]
                    agreeing = _ZERO if agreeing < 0 else agreeing
                    total[e] += agreeing
                    share[e] += weight if agreeing > 0 else _ZERO
            if normalize:
                for e in range(m):
                    total[e] /= share[e] if share[e] != 0 else _ONE
            for e in range(m):
                total[e] *= x[e]
        elif divisor != 1:
            for e in range(m):
                total[e] /= divisor
        o = out[at : at + m]
        for e in range(m):
            o[e] = b[e] - (total[e] * minus_lambda + _ZERO)


@numba.njit(nogil=True, cache=True)
def merge_values(experts: Stored, weights: Floats, divisor: np.float32, out: Floats) -> None:
    """Fill `out` [n] with Σ wₖTₖ over `divisor`, in fused multiply-adds; `experts` are [K, n]."""
    n = len(out)
    total, x = np.empty(TILE_ELEMS, np.float32), np.empty(TILE_ELEMS, np.float32)
    for at in range(0, n, TILE_ELEMS):
        m = min(TILE_ELEMS, n - at)
        _widen(experts[0, at : at + m], total)
        for e in range(m):
            total[e] *= weights[0]
        for k in range(1, len(weights)):
            _widen(experts[k, at : at + m], x)
            for e in range(m):
                total[e] = fma(x[e], weights[k], total[e])  # type: ignore[call-arg]
        if divisor != 1:
            for e in range(m):
                total[e] /= divisor
        out[at : at + m] = total[:m]


@numba.njit(nogil=True, cache=True, inline="always")
def _widen(stored: Stored, out: Floats) -> None:
    for e in range(len(stored)):
        out[e] = value_of(stored[e])


@numba.njit(nogil=True, cache=True, inline="always")
def _add_plain(
    stored: Stored, base: Floats, scale: np.float32, weight: np.float32, d: Floats, total: Floats
) -> None:
    """Let `d` be (T − B)·scale·weight, and add it to `total`."""
    for e in range(len(stored)):
        d[e] = (value_of(stored[e]) - base[e]) * scale * weight
        total[e] += d[e]


@numba.njit(nogil=True, cache=True, inline="always")
def _add_large(
    stored: Stored,
    base: Floats,
    least: np.float32,
    scale: np.float32,
    weight: np.float32,
    d: Floats,
    total: Floats,
) -> None:
    """As `_add_plain`, of what is `least` or more in magnitude."""
    for e in range(len(stored)):
        delta = value_of(stored[e]) - base[e]
        d[e] = delta * (_ONE if abs(delta) >= least else _ZERO) * scale * weight
        total[e] += d[e]


@numba.njit(nogil=True, cache=True, inline="always")
def _add_drawn(
    stored: Stored,
    base: Floats,
    drawn: npt.NDArray[np.uint32],
    keep_below: np.uint32,
    scale: np.float32,
    weight: np.float32,
    d: Floats,
    total: Floats,
) -> None:
    """As `_add_plain`, of what is drawn below `keep_below`."""
    for e in range(len(stored)):
        delta = value_of(stored[e]) - base[e]
        d[e] = delta * (_ONE if drawn[e] < keep_below else _ZERO) * scale * weight
        total[e] += d[e]
