"""The order in which experts' blocks are read, against all subsets of small output blocks."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.planner.chains import additive_chains, affordable, falling, hull_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: What a sum of products with cosines in float32 may be off by, of its first term.
_ROUNDED = 4e-6


def in_python(kernel: Any) -> Any:
    """What a kernel is compiled from."""
    return kernel.py_func


class OutBlocks:
    """Random deltas of a few output blocks: vectors of 8 elements, of exact sizes and cosines."""

    def __init__(
        self, seed: int, *, blocks: int = 3, experts: int = 4, alike: bool = False
    ) -> None:
        rng = np.random.default_rng(seed)
        common = rng.normal(size=(blocks, 1, 8)) * rng.uniform(-3, 3, (blocks, experts, 1))
        self.deltas = common + rng.normal(size=(blocks, experts, 8))
        self.nbytes = rng.integers(1, 6, (blocks, experts))
        self.nbytes[rng.random((blocks, experts)) < (0 if alike else 0.2)] = 0
        self.nbytes[:] = 4 if alike else self.nbytes
        norms = np.linalg.norm(self.deltas, axis=2)
        sign = rng.choice([-1.0, 1.0], (blocks, experts))
        self.size = norms * sign
        units = self.deltas / norms[:, :, None]
        self.cosine = np.einsum("sik,sjk->sij", units, units).astype(np.float32)
        self.deltas *= sign[:, :, None]

    def chains(self, compiled: bool = True) -> tuple[Ints, Floats]:
        order = np.full(self.size.shape, -7, np.int64)
        residual = np.full((len(order), order.shape[1] + 1), np.nan)
        run = additive_chains if compiled else in_python(additive_chains)
        run(self.size, np.ones_like(self.size), self.cosine, self.nbytes, order, residual)
        return order, residual

    def hull(self, compiled: bool = True) -> tuple[Ints, Floats, Ints]:
        order, residual = self.chains()
        item = np.full(order.shape, -1, np.int64)
        saved, cost = np.zeros(order.shape), np.zeros(order.shape, np.int64)
        run = hull_of if compiled else in_python(hull_of)
        run(order, residual, self.nbytes, item, saved, cost)
        return item, saved, cost

    def left(self, block: int, bought: tuple[int, ...]) -> float:
        """‖Σ omitted‖², of what there is to read."""
        there = [i for i in np.flatnonzero(self.nbytes[block]) if i not in bought]
        return float(np.square(self.deltas[block, there].sum(axis=0)).sum())


@given(seed=st.integers(0, 2**32))
def test_after_every_purchase_the_residual_is_that_of_what_is_still_omitted(seed: int) -> None:
    blocks = OutBlocks(seed)
    order, residual = blocks.chains()
    for s in range(len(order)):
        members = [int(i) for i in order[s] if i >= 0]
        assert sorted(members) == np.flatnonzero(blocks.nbytes[s]).tolist()
        assert (order[s, len(members) :] == -1).all()
        scale = 1e-6 * float(np.square(blocks.size[s]).sum()) * len(members)
        for n in range(len(members) + 1):
            assert residual[s, n] == pytest.approx(blocks.left(s, tuple(members[:n])), abs=scale)
        assert (residual[s, len(members) :] == 0).all()


def is_greedy(blocks: OutBlocks, block: int, members: list[int], *, downward: bool) -> bool:
    """Whether each item saves the most of what is not yet read, or each omission costs the
    least of what is not yet omitted."""
    for n in range(len(members)):
        bought = tuple(members[: n + 1] if downward else members[:n])
        now = blocks.left(block, bought)
        change = {}
        for i in bought if downward else members[n:]:
            then = tuple(b for b in bought if b != i) if downward else (*bought, i)
            change[i] = (blocks.left(block, then) - now) / blocks.nbytes[block, i]
        if change[members[n]] > min(change.values()) + 1e-6 * max(map(abs, change.values())):
            return False
    return True


@given(seed=st.integers(0, 2**32))
def test_a_chain_saves_the_most_first_or_omits_the_least_last(seed: int) -> None:
    blocks = OutBlocks(seed)
    order, _ = blocks.chains()
    for s in range(len(order)):
        members = [int(i) for i in order[s] if i >= 0]
        assert any(is_greedy(blocks, s, members, downward=d) for d in (False, True))


def lower_hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The falling part of the lower convex hull of (bytes, residual), by trying all chords."""
    falling_points = [points[0]]
    while True:
        cost, left = falling_points[-1]
        steps = [((left - r) / (c - cost), c, r) for c, r in points if c > cost and r < left]
        if not steps:
            return falling_points
        best = max(worth for worth, _, _ in steps)
        falling_points.append(min((c, r) for worth, c, r in steps if worth >= best * (1 - 1e-9)))


@given(seed=st.integers(0, 2**32))
def test_purchases_are_the_lower_convex_hull_of_the_chain(seed: int) -> None:
    blocks = OutBlocks(seed)
    order, residual = blocks.chains()
    item, saved, cost = blocks.hull()
    for s in range(len(order)):
        spent = np.cumsum([0, *(blocks.nbytes[s, i] for i in order[s] if i >= 0)]).tolist()
        hull = lower_hull([(b, float(r)) for b, r in zip(spent, residual[s], strict=False)])
        n = len(hull) - 1
        found = np.cumsum([0, *cost[s, :n]]).tolist()
        assert found == [b for b, _ in hull]
        left = residual[s, 0] - np.cumsum([0.0, *saved[s, :n]])
        assert left == pytest.approx([r for _, r in hull], abs=_ROUNDED * (1 + residual[s, 0]))
        assert (saved[s, n:] == 0).all()
        numbers = item[s][item[s] >= 0]
        assert (np.diff(numbers) >= 0).all()
        assert set(numbers.tolist()) == set(range(n))
        for m in range(n):
            members = order[s][: len(item[s])][item[s] == m]
            assert blocks.nbytes[s, members].sum() == cost[s, m]


@given(seed=st.integers(0, 2**32))
def test_of_two_equally_dear_experts_every_prefix_is_the_best_of_its_size(seed: int) -> None:
    blocks = OutBlocks(seed, experts=2, alike=True)
    _, residual = blocks.chains()
    for s in range(len(residual)):
        for n in range(3):
            best = min(blocks.left(s, b) for b in combinations(range(2), n))
            assert residual[s, n] == pytest.approx(best, abs=_ROUNDED * (1 + residual[s, 0]))


def test_chains_of_larger_sites_are_near_the_hull_of_all_subsets() -> None:
    found, best = 0.0, 0.0
    for seed in range(60):
        blocks = OutBlocks(seed, experts=5, alike=True)
        _, residual = blocks.chains()
        for s in range(len(residual)):
            least = [min(blocks.left(s, b) for b in combinations(range(5), n)) for n in range(6)]
            assert (residual[s] >= np.array(least) - _ROUNDED * (1 + residual[s, 0])).all()
            hulls = [lower_hull(list(enumerate(p))) for p in (residual[s].tolist(), least)]
            areas = [float(np.interp(np.arange(0, 5.1, 0.1), *np.array(h).T).sum()) for h in hulls]
            found, best = found + areas[0], best + areas[1]
    assert found <= 1.01 * best


def test_deltas_that_cancel_each_other_are_not_bought() -> None:
    cosine = np.array([[[1, -1, 0], [-1, 1, 0], [0, 0, 1]]], np.float32)
    size, nbytes = np.array([[5.0, 5.0, 1.0]]), np.full((1, 3), 2)
    order, residual = np.zeros((1, 3), np.int64), np.zeros((1, 4))
    additive_chains(size, np.ones_like(size), cosine, nbytes, order, residual)
    assert order[0, 0] == 2
    assert residual.tolist() == [[1.0, 0.0, 25.0, 0.0]]
    item = np.full((1, 3), -1, np.int64)
    saved, cost = np.zeros((1, 3)), np.zeros((1, 3), np.int64)
    hull_of(order, residual, nbytes, item, saved, cost)
    assert item.tolist() == [[0, -1, -1]], "no purchase that saves nothing"


def test_equal_experts_are_bought_one_by_one_in_their_order() -> None:
    order, residual = np.zeros((1, 4), np.int64), np.zeros((1, 5))
    nbytes, size = np.full((1, 4), 3), np.full((1, 4), 0.1)
    cosine = np.eye(4, dtype=np.float32)[None]
    additive_chains(size, np.ones_like(size), cosine, nbytes, order, residual)
    assert order.tolist() == [[0, 1, 2, 3]]
    assert residual == pytest.approx(0.01 * np.array([[4, 3, 2, 1, 0]]))
    item = np.full((1, 4), -1, np.int64)
    saved, cost = np.zeros((1, 4)), np.zeros((1, 4), np.int64)
    hull_of(order, residual, nbytes, item, saved, cost)
    assert item.tolist() == [[0, 1, 2, 3]]
    assert cost.tolist() == [[3, 3, 3, 3]]


@given(seed=st.integers(0, 2**32))
def test_compiled_loops_do_what_their_python_does(seed: int) -> None:
    blocks = OutBlocks(seed)
    for found, wanted in zip(blocks.chains(), blocks.chains(compiled=False), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-9)
    for found, wanted in zip(blocks.hull(), blocks.hull(compiled=False), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    rng = np.random.default_rng(seed)
    worth, chain = rng.random(20), np.sort(rng.integers(0, 6, 20))
    np.testing.assert_array_equal(falling(worth, chain), in_python(falling)(worth, chain))
    fits = items(seed)
    np.testing.assert_array_equal(affordable(*fits), in_python(affordable)(*fits))


def items(seed: int) -> tuple[Ints, Ints, Ints, Ints, Ints, int, Ints, int]:
    """Arguments of `affordable`: a list of items with chains, owners and caps."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, 12)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    shares, owners = rng.integers(0, 9, first[-1]), rng.integers(0, 3, first[-1])
    cost = np.add.reduceat(shares, first[:-1])
    chain, caps = rng.integers(0, 5, 12), rng.integers(0, 60, 3)
    return cost, chain, owners, shares, first, int(rng.integers(0, 120)), caps, 5


@given(seed=st.integers(0, 2**32))
def test_what_is_affordable_is_within_budget_and_caps_and_passes_over_no_chain(seed: int) -> None:
    cost, chain, owners, shares, first, budget, caps, n_chains = items(seed)
    taken = affordable(cost, chain, owners, shares, first, budget, caps, n_chains)
    left, room, closed = budget, caps.copy(), set()
    for p in range(len(cost)):
        own = np.zeros(3, np.int64)
        np.add.at(own, owners[first[p] : first[p + 1]], shares[first[p] : first[p + 1]])
        fits = chain[p] not in closed and cost[p] <= left and (own[own > 0] <= room[own > 0]).all()
        assert bool(taken[p]) == bool(fits)
        if fits:
            left, room = left - cost[p], room - own
        else:
            closed.add(int(chain[p]))


@given(seed=st.integers(0, 2**32))
def test_a_fallen_worth_never_rises_along_a_chain_and_changes_no_first_offer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    worth, chain = rng.random(20), np.sort(rng.integers(0, 6, 20))
    found = falling(worth, chain)
    for n in np.unique(chain):
        here = chain == n
        np.testing.assert_array_equal(found[here], np.minimum.accumulate(worth[here]))
