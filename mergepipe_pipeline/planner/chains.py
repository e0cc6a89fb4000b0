"""In which order the experts' blocks are best read, and what is left of the error after each.

An output block is one block of a merged tensor; what can be read for it is that block of each
expert. The loops are compiled: a large merge has tens of thousands of output blocks of a hundred
experts.
"""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, F32Array, F64Array, I32Array, I64Array
from mergepipe_pipeline.jit import cached_njit

Numbers = I32Array | I64Array
#: Savings per byte that differ by less are equal.
_ROUNDING = 1e-9


@cached_njit(nogil=True)
def additive_chains(
    size: F64Array,
    kept: F64Array,
    cosine: F32Array,
    nbytes: I64Array,
    order: I64Array,
    residual: F64Array,
) -> None:
    """A good order of items for sums, by what they leave of ‖Σ omitted cδ‖².

    `size` [out_blocks, E] is c·‖δ‖ with c's sign, `cosine` [out_blocks, E, E], `nbytes`
    [out_blocks, E] (0: nothing to read). Of its squared norm a delta keeps the share `kept`
    [out_blocks, E], and of an inner product the product of both shares: exactly so, on average,
    where it drops at random. Fills `order` [out_blocks, E] with expert numbers (−1 after the last)
    and `residual` [out_blocks, E + 1] with what is left after so many items.

    Of two greedy orders it is the one with the lower hull: what saves the most per byte first, or
    what costs the least to omit last. The first keeps deltas that cancel each other unread, the
    second finds what cancels among all that is left.
    """
    n_out_blocks, count = size.shape
    by_saving, saving_residual = np.empty(count, np.int64), np.empty(count + 1)
    for b in range(n_out_blocks):
        _omit_least(size[b], kept[b], cosine[b], nbytes[b], order[b], residual[b])
        _save_most(size[b], kept[b], cosine[b], nbytes[b], by_saving, saving_residual)
        area = _area(by_saving, saving_residual, nbytes[b])
        if area < _area(order[b], residual[b], nbytes[b]):
            order[b] = by_saving
            residual[b] = saving_residual


@cached_njit(nogil=True)
def _omit_least(
    size: F64Array,
    kept: F64Array,
    cosine: F32Array,
    nbytes: I64Array,
    order: I64Array,
    residual: F64Array,
) -> None:
    """One output block's order from the end: of all that is read, omit next what costs least.

    Costs are per byte. `size`, `kept`, `nbytes`, `order` [E], `cosine` [E, E], `residual` [E + 1].
    `pull[i]` is what expert i's delta has in common with those omitted. Loops run over all experts,
    so that they compile to vector instructions; what `blocked` makes infinite is never the least.
    """
    count, n = len(size), (nbytes > 0).sum()
    mean, rate, blocked = size * kept, np.zeros(count), np.full(count, np.inf)
    for i in range(count):
        if nbytes[i] > 0:
            rate[i], blocked[i] = 1.0 / nbytes[i], 0.0
    pull, total, worth = np.zeros(count), 0.0, np.empty(count)
    order[:], residual[:] = -1, 0.0
    for step in range(n):
        best, least = -1, np.inf
        for i in range(count):
            worth[i] = mean[i] * (2 * pull[i] + size[i]) * rate[i] + blocked[i]
        for i in range(count):
            if worth[i] <= least:  # of equals the last, which stands last in the order
                best, least = i, worth[i]
        total += mean[best] * (2 * pull[best] + size[best])
        blocked[best] = np.inf
        # The first step omits from everything read, of which exactly nothing is left.
        order[n - 1 - step], residual[n - 1 - step] = best, max(total, 0.0)
        row = cosine[best]
        for i in range(count):
            pull[i] += mean[best] * row[i]


@cached_njit(nogil=True)
def _save_most(
    size: F64Array,
    kept: F64Array,
    cosine: F32Array,
    nbytes: I64Array,
    order: I64Array,
    residual: F64Array,
) -> None:
    """One output block's order from the start: of all that is omitted, read next what saves most.

    Savings are per byte; arguments and loops as in `_omit_least`.
    """
    count, n = len(size), (nbytes > 0).sum()
    mean, rate, blocked = size * kept, np.zeros(count), np.full(count, np.inf)
    pull, total, worth = np.zeros(count), 0.0, np.empty(count)
    for i in range(count):
        if nbytes[i] > 0:
            rate[i], blocked[i] = -1.0 / nbytes[i], 0.0
            for j in range(count):
                pull[j] += mean[i] * cosine[i, j] if i != j else 0.0
    for i in range(count):
        total += mean[i] * (pull[i] + size[i]) if nbytes[i] > 0 else 0.0
    order[:], residual[:] = -1, 0.0
    residual[0] = max(total, 0.0)
    for step in range(n):
        best, least = -1, np.inf
        for i in range(count):
            worth[i] = mean[i] * (2 * pull[i] + size[i]) * rate[i] + blocked[i]
        for i in range(count):
            if worth[i] < least:  # of equals the first
                best, least = i, worth[i]
        total -= mean[best] * (2 * pull[best] + size[best])
        blocked[best] = np.inf
        order[step] = best
        if step < n - 1:  # with everything read, exactly nothing is left
            residual[step + 1] = max(total, 0.0)
        row = cosine[best]
        for i in range(count):
            pull[i] -= mean[best] * row[i]


@cached_njit(nogil=True)
def _area(order: I64Array, residual: F64Array, nbytes: I64Array) -> float:
    """The area between zero and one output block's hull of residual over bytes."""
    at, area = 0, 0.0
    while True:
        to, cost = _next(order, residual, nbytes, at)
        if to < 0:
            break
        area += cost * (residual[at] + residual[to]) / 2
        at = to
    for k in range(at, len(order)):
        if order[k] >= 0:
            area += nbytes[order[k]] * residual[at]
    return area


@cached_njit(nogil=True)
def _next(order: I64Array, residual: F64Array, nbytes: I64Array, at: int) -> tuple[int, int]:
    """The hull's next corner after `at` items and its bytes from there; (−1, 0): none saves."""
    best, best_worth, best_cost, spent = -1, 0.0, 0, 0
    for to in range(at, len(order)):
        if order[to] < 0:
            break
        spent += nbytes[order[to]]
        # What is not finite may have put one without bytes first.
        worth = (residual[at] - residual[to + 1]) / spent if spent > 0 else 0.0
        # Of equal ones the nearest: what can be read alone is not read together.
        if worth > best_worth * (1 + _ROUNDING):
            best, best_worth, best_cost = to + 1, worth, spent
    return best, best_cost


@cached_njit(nogil=True)
def hull_of(
    order: I64Array,
    residual: F64Array,
    nbytes: I64Array,
    item: I64Array,
    saved: F64Array,
    cost: I64Array,
) -> None:
    """The items worth making in a row: the lower convex hull of residual over bytes.

    Arguments as in `additive_chains`. Item n of output block b takes the experts at the places k of
    its order with `item[b, k]` = n (−1: read by none), for `cost[b, n]` bytes, and saves
    `saved[b, n]` (0: there is no such item). What is saved per byte falls from one to the next.
    """
    for b in range(len(order)):
        at, n = 0, 0
        while True:
            to, spent = _next(order[b], residual[b], nbytes[b], at)
            if to < 0:
                break
            item[b, at:to] = n
            saved[b, n] = residual[b, at] - residual[b, to]
            cost[b, n] = spent
            at, n = to, n + 1


@cached_njit(nogil=True)
def affordable(
    cost: I64Array,
    chain: Numbers,
    owners: Numbers,
    shares: I64Array,
    first: I64Array,
    budget_bytes: int,
    caps: I64Array,
    n_chains: int,
) -> BoolArray:
    """Which items fit, going down a list sorted by worth; one that does not is passed over.

    Item p costs `cost[p]` bytes and belongs to chain `chain[p]`, of which nothing further is
    read once one is passed over. It takes `shares[k]` bytes of expert `owners[k]` for k in
    [first[p], first[p + 1]); no expert gives more than its cap.
    """
    taken = np.zeros(len(cost), np.bool_)
    closed = np.zeros(n_chains, np.bool_)
    remaining, room = budget_bytes, caps.copy()
    for p in range(len(cost)):
        if closed[chain[p]]:
            continue
        fits = cost[p] <= remaining
        for k in range(first[p], first[p + 1]):
            room[owners[k]] -= shares[k]
        for k in range(first[p], first[p + 1]):
            fits = fits and room[owners[k]] >= 0
        if fits:
            taken[p] = True
            remaining -= cost[p]
        else:
            closed[chain[p]] = True
            for k in range(first[p], first[p + 1]):
                room[owners[k]] += shares[k]
    return taken


@cached_njit(nogil=True)
def falling(worth: F64Array, chain: Numbers) -> F64Array:
    """`worth` made to fall along every chain, whose items stand together: the least so far."""
    out = worth.copy()
    for p in range(1, len(out)):
        if chain[p] == chain[p - 1]:
            out[p] = min(out[p], out[p - 1])
    return out
