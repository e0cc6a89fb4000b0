"""The arithmetic of `steps.fused`, compiled: one pass over a window of bfloat16 or float32.

Works in tiles that stay in the cache, so that a window is read once from memory, whatever the
number of experts. Measured per element and expert on one core: sums 0.1 ns, ties 0.25 and dare 0.37
with inputs in the cache; 0.2, 0.35 and 0.5 for 20 experts from memory (0.1 to 0.15 more without
`prefetch`); torch, an operation at a time, 2.2 to 9 ns. Every operation rounds as its torch
counterpart does, so the bits are those of `Operator.apply`.

Below, m ≤ TILE_ELEMS is the number of elements in a tile, K that of the experts in a window. Loops
are written for the vectorizer: a mask is a factor of one or zero, as in torch, and never a branch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F32Array, U32Array
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.operators.kernels.bits import Stored, fma, times, value_of
from mergepipe_pipeline.operators.kernels.mixing import Mixing
from mergepipe_pipeline.operators.kernels.prefetch import prefetch_row
from mergepipe_pipeline.operators.kernels.uniforms import fill_uniforms

#: Elements that are worked on at once: of a tensor, tiles begin at its multiples.
TILE_ELEMS = 2048
#: What `steps` say of a tile whose row holds stored elements, and of one where T equals B.
STORED, ABSENT = np.float32(0), np.float32(-1)
_ONE, _ZERO = np.float32(1), np.float32(0)


@cached_njit(nogil=True)
def merge_update(
    base: Stored,
    experts: Stored,
    steps: F32Array,
    rows: npt.NDArray[np.void],
    start_elem: int,
    mixing: Mixing,
    out: F32Array,
) -> None:
    """Fill `out` [n] with B + λ · the sum, or the vote, of what the steps leave of the deltas.

    `base` is [n], `experts` [p, n], `rows` [K] of type ROW; the window starts at `start_elem`.
    `steps` [p, tiles] say what each row holds in each tile of the tensor's that the window has a
    part of: STORED elements, nothing (ABSENT), or int16 numbers of that step, whose δ they are.
    """
    # A vote looks at all deltas again once the signs are known, a sum at one delta at a time.
    deltas = np.empty((len(rows) if mixing.votes else 1, TILE_ELEMS), np.float32)
    b, total = np.empty(TILE_ELEMS, np.float32), np.empty(TILE_ELEMS, np.float32)
    sign, share = np.empty(TILE_ELEMS, np.float32), np.empty(TILE_ELEMS, np.float32)
    drawn, nothing = np.empty(TILE_ELEMS, np.uint32), np.zeros(TILE_ELEMS, np.float32)
    weights, near = np.empty(len(rows), np.float32), np.empty(TILE_ELEMS, np.float32)
    before = start_elem % TILE_ELEMS  # elements of the first tile that the window lacks
    for tile in range(-(-(before + len(out)) // TILE_ELEMS)):
        at = max(0, tile * TILE_ELEMS - before)
        m = min((tile + 1) * TILE_ELEMS - before, len(out)) - at
        _widen(base[at : at + m], b)  # [m]
        # Once a tile, not once a row: to make a slice takes longer than some rows' arithmetic.
        base_tile, none, sums, numbers, random = b[:m], nothing[:m], total[:m], near[:m], drawn[:m]
        sums[:] = 0
        count = 0  # experts that differ from the base in this tile
        for i in range(len(rows)):
            row, step = rows[i], steps[rows[i].place, tile]
            if step == ABSENT:
                continue
            prefetch_row(experts, row.place, at + m, at + m + TILE_ELEMS)
            stored, delta = experts[row.place, at : at + m], deltas[count * mixing.votes, :m]
            weights[count], count = row.weight, count + 1
            subtracted = none if row.is_delta else base_tile
            if not mixing.votes and _is_plain(row):
                _sum_row(stored, subtracted, step, row, sums)
            elif step == STORED:
                _add_row(stored, subtracted, row, start_elem + at, random, delta, sums)
            else:
                times(stored, step, numbers)
                _add_row(numbers, none, row, start_elem + at, random, delta, sums)
        if mixing.votes:
            _vote(deltas, weights[:count], mixing.normalize, sign, share, sums)
        else:
            _divide(sums, mixing.divisor)
        _add_update(base_tile, sums, mixing.minus_lambda, out[at : at + m])


@cached_njit(nogil=True, inline="always")
def _is_plain(row: Any) -> Any:
    """Whether nothing is left out of a row's deltas."""
    return not (row.trims or row.draws or row.drops_outliers) and row.divisor == 1


@cached_njit(nogil=True)
def _sum_row(stored: Stored, base: F32Array, step: np.float32, row: Any, total: F32Array) -> None:
    """Add a plain row's weighted δ on a tile to `total` [m]: one pass, as there is no vote on δ."""
    scale, weight = row.scale, row.weight
    if step != STORED:
        for e in range(len(stored)):
            total[e] += np.float32(np.int16(stored[e])) * step * scale * weight
    else:
        for e in range(len(stored)):
            total[e] += (value_of(stored[e]) - base[e]) * scale * weight


@cached_njit(nogil=True)
def merge_values(experts: Stored, weights: F32Array, divisor: np.float32, out: F32Array) -> None:
    """Fill `out` [n] with Σ wₖTₖ over `divisor`, in fused multiply-adds; `experts` are [K, n]."""
    total, x = np.empty(TILE_ELEMS, np.float32), np.empty(TILE_ELEMS, np.float32)
    for at in range(0, len(out), TILE_ELEMS):
        m = min(TILE_ELEMS, len(out) - at)
        _widen(experts[0, at : at + m], total)  # [m]
        for e in range(m):
            total[e] *= weights[0]
        for k in range(1, len(weights)):
            prefetch_row(experts, k, at + m, at + m + TILE_ELEMS)
            _widen(experts[k, at : at + m], x)
            for e in range(m):
                total[e] = fma(x[e], weights[k], total[e])  # type: ignore[call-arg]
        _divide(total[:m], divisor)
        out[at : at + m] = total[:m]


@cached_njit(nogil=True)
def _add_row(
    stored: Stored,
    base: F32Array,
    row: Any,
    start_elem: int,
    drawn: U32Array,
    delta: F32Array,
    total: F32Array,
) -> None:
    """Let `delta` [m] be the row's weighted δ on a tile, and add it to `total` [m].

    δ is `stored` less `base` [m]. `drawn` [m] is room for random numbers.
    """
    scale, weight = row.scale, row.weight
    is_rare = row.drops_outliers or row.divisor != 1
    if is_rare or (row.trims and row.draws):
        _add_by_steps(stored, base, row, start_elem, drawn, delta, total)
    elif row.draws:
        fill_uniforms(row.stream, start_elem, drawn)
        _add_drawn(stored, base, drawn, row.keep_below, scale, weight, delta, total)
    elif row.trims:
        # Ties with the threshold are kept before the cut; behind it, what beats a tie is kept.
        cut = _cut(row.trim_stop_elem, start_elem, len(delta))
        least, beats = row.trim_threshold, row.next_threshold
        _add_large(stored[:cut], base, least, scale, weight, delta, total)
        _add_large(stored[cut:], base[cut:], beats, scale, weight, delta[cut:], total[cut:])
    else:
        _add_plain(stored, base, scale, weight, delta, total)


@cached_njit(nogil=True, inline="always")
def _add_plain(
    stored: Stored,
    base: F32Array,
    scale: np.float32,
    weight: np.float32,
    delta: F32Array,
    total: F32Array,
) -> None:
    """Let `delta` be (T − B)·scale·weight, and add it to `total`."""
    for e in range(len(stored)):
        delta[e] = (value_of(stored[e]) - base[e]) * scale * weight
        total[e] += delta[e]


@cached_njit(nogil=True, inline="always")
def _add_large(
    stored: Stored,
    base: F32Array,
    least: np.float32,
    scale: np.float32,
    weight: np.float32,
    delta: F32Array,
    total: F32Array,
) -> None:
    """Add what is `least` or more in magnitude; see `_add_plain`."""
    for e in range(len(stored)):
        d = value_of(stored[e]) - base[e]
        delta[e] = d * (_ONE if abs(d) >= least else _ZERO) * scale * weight
        total[e] += delta[e]


@cached_njit(nogil=True, inline="always")
def _add_drawn(
    stored: Stored,
    base: F32Array,
    drawn: U32Array,
    keep_below: np.uint32,
    scale: np.float32,
    weight: np.float32,
    delta: F32Array,
    total: F32Array,
) -> None:
    """Add what is drawn below `keep_below`; see `_add_plain`."""
    for e in range(len(stored)):
        d = value_of(stored[e]) - base[e]
        delta[e] = d * (_ONE if drawn[e] < keep_below else _ZERO) * scale * weight
        total[e] += delta[e]


@cached_njit(nogil=True)
def _add_by_steps(
    stored: Stored,
    base: F32Array,
    row: Any,
    start_elem: int,
    drawn: U32Array,
    delta: F32Array,
    total: F32Array,
) -> None:
    """Add a row for any steps: each goes over the tile by itself, in the order of torch."""
    scale, divisor, weight = row.scale, row.divisor, row.weight
    _widen(stored, delta)
    for e in range(len(delta)):
        delta[e] -= base[e]
    if row.trims:
        _trim(delta, _cut(row.trim_stop_elem, start_elem, len(delta)), row.trim_threshold)
    if row.drops_outliers:
        cut = _cut(row.outlier_stop_elem, start_elem, len(delta))
        _drop_outliers(delta, cut, row.outlier_threshold)
    if row.draws:
        fill_uniforms(row.stream, start_elem, drawn)
        _drop_drawn(delta, drawn, row.keep_below)
    if scale != 1:
        for e in range(len(delta)):
            delta[e] *= scale
    if divisor != 1:
        for e in range(len(delta)):
            delta[e] /= divisor
    for e in range(len(delta)):
        delta[e] *= weight
        total[e] += delta[e]


@cached_njit(nogil=True, inline="always")
def _cut(stop_elem: int, start_elem: int, m: int) -> int:
    """How many elements of a tile of m, which starts at `start_elem`, lie before `stop_elem`."""
    return min(max(stop_elem - start_elem, 0), m)


@cached_njit(nogil=True, inline="always")
def _trim(delta: F32Array, cut: int, threshold: np.float32) -> None:
    """Keep what is larger than the threshold, and ties with it before `cut`."""
    for e in range(cut):
        delta[e] *= _ONE if abs(delta[e]) >= threshold else _ZERO
    for e in range(cut, len(delta)):
        delta[e] *= _ONE if abs(delta[e]) > threshold else _ZERO


@cached_njit(nogil=True, inline="always")
def _drop_outliers(delta: F32Array, cut: int, threshold: np.float32) -> None:
    """Drop what `_trim` would keep."""
    for e in range(cut):
        delta[e] *= _ONE if abs(delta[e]) < threshold else _ZERO
    for e in range(cut, len(delta)):
        delta[e] *= _ONE if abs(delta[e]) <= threshold else _ZERO


@cached_njit(nogil=True, inline="always")
def _drop_drawn(delta: F32Array, drawn: U32Array, keep_below: np.uint32) -> None:
    for e in range(len(delta)):
        delta[e] *= _ONE if drawn[e] < keep_below else _ZERO


@cached_njit(nogil=True)
def _vote(
    deltas: F32Array,
    weights: F32Array,
    normalize: bool,
    sign: F32Array,
    share: F32Array,
    total: F32Array,
) -> None:
    """Replace `total` [m], the sum of the first deltas, by the sum of those of its sign.

    If `normalize`, divided by the sum of their `weights` [count]. A delta of zero never agrees, a
    total of zero counts as positive. `deltas` [count or more, TILE_ELEMS] are whole, as rows of a
    slice would not count as contiguous and not be vectorized; `sign` and `share` are scratch.
    """
    m = len(total)
    for e in range(m):
        sign[e] = _ONE if total[e] >= 0 else -_ONE
        total[e] = 0
        share[e] = 0
    for i in range(len(weights)):
        delta, weight = deltas[i], weights[i]
        if normalize:
            for e in range(m):
                agreeing = delta[e] * sign[e]  # |delta| or, against the vote, −|delta|
                total[e] += _ZERO if agreeing < 0 else agreeing
                share[e] += weight if agreeing > 0 else _ZERO
        else:  # shares would be a third of the work
            for e in range(m):
                agreeing = delta[e] * sign[e]
                total[e] += _ZERO if agreeing < 0 else agreeing
    if normalize:
        for e in range(m):
            total[e] /= share[e] if share[e] != 0 else _ONE
    for e in range(m):
        total[e] *= sign[e]


@cached_njit(nogil=True, inline="always")
def _divide(total: F32Array, divisor: np.float32) -> None:
    if divisor != 1:
        for e in range(len(total)):
            total[e] /= divisor


@cached_njit(nogil=True, inline="always")
def _add_update(base: F32Array, update: F32Array, minus_lambda: np.float32, out: F32Array) -> None:
    """Let `out` be base + λ · update; where the update is zero of either sign, the base's bits."""
    for e in range(len(out)):
        # −0 − 0 is −0 while −0 + 0 is +0: the negated update is made +0 and subtracted.
        out[e] = base[e] - (update[e] * minus_lambda + _ZERO)


@cached_njit(nogil=True, inline="always")
def _widen(stored: Stored, out: F32Array) -> None:
    for e in range(len(stored)):
        out[e] = value_of(stored[e])
