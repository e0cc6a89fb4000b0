"""How a budget goes down a list of items: pins first, exclusions never, caps and chains kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.candidates import Candidates, Curve, lay_out
from mergepipe_pipeline.planner.constraints import Constraints
from mergepipe_pipeline.planner.items import Items, chain_items, joined, spend
from mergepipe_pipeline.planner.strategies import STRATEGIES, choose, rank
from tests.planner.drawn import GRID, Drawn, candidates, constraints, known, row

pytestmark = pytest.mark.usefixtures("baselines")

SEEDS = st.integers(0, 2**32)


def drawn_limits(c: Candidates, seed: int) -> Constraints:
    """Random limits: whole rows pinned and excluded, caps of some experts, pins affordable."""
    rng = np.random.default_rng(seed)
    pinned, excluded = (rng.random((2, len(c.rows))) < 0.2)[:, c.row]
    total, free = int(c.nbytes.sum()), constraints(c)
    caps = np.where(rng.random(len(free.caps)) < 0.5, rng.integers(0, total + 1), free.caps)
    pins = int(c.nbytes[pinned & ~c.zero].sum())
    return Constraints(int(rng.integers(pins, total + 1)), caps, pinned, excluded)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(c=candidates(), seed=SEEDS)
def test_limits_hold_whatever_is_bought(strategy: str, c: Candidates, seed: int) -> None:
    given = drawn_limits(c, seed)
    chosen = choose(c, given, strategy)
    pinned = given.pinned & ~c.zero
    assert c.nbytes[chosen].sum() <= given.budget_bytes
    assert chosen[pinned].all()
    assert not (chosen & given.excluded & ~given.pinned).any()
    assert not (chosen & c.zero).any()
    for expert, cap in enumerate(given.caps):
        own = c.expert == expert
        assert c.nbytes[chosen & own].sum() <= max(cap, c.nbytes[pinned & own].sum())


@given(c=candidates(), seed=SEEDS)
def test_along_a_chain_nothing_is_bought_after_what_is_not(c: Candidates, seed: int) -> None:
    given = drawn_limits(c, seed)
    free = ~c.zero & ~given.pinned & ~given.excluded
    items, order = rank(c, "conflict_aware", free)
    chosen = spend(c, items, order, given)
    open_chains: dict[int, bool] = {}
    for p, chain in enumerate(items.chain.tolist()):
        own = chosen[items.members[items.first[p] : items.first[p + 1]]]
        assert own.all() or not own.any(), "an offer is bought whole"
        assert open_chains.get(chain, True) or not own.any()
        open_chains[chain] = bool(own.all())


@given(c=candidates())
def test_a_chain_is_ranked_in_its_own_order_with_falling_worth(c: Candidates) -> None:
    items, order = rank(c, "conflict_aware", ~c.zero)
    for chain in np.unique(items.chain):
        places = [int(p) for p in order if items.chain[p] == chain]
        assert places == sorted(places)
    assert (items.saved[items.chain < c.n_out_blocks] > 0).all()


def test_items_are_taken_in_order_and_one_that_does_not_fit_is_passed_over() -> None:
    c = lay_out([row(1.0, 1.0, 1.0), row(1.0, 1.0, 1.0, position=1)], GRID)
    first = np.array([0, 3, 4, 6])
    items = Items(np.arange(3), np.ones(3), first, np.array([0, 1, 2, 3, 4, 5]))
    for budget, wanted in ((6, [0, 1, 2, 3, 4, 5]), (4, [0, 1, 2, 3]), (2, [3]), (0, [])):
        chosen = spend(c, items, np.arange(3), constraints(c, budget * 8192))
        assert np.flatnonzero(chosen).tolist() == wanted
    chosen = spend(c, items, np.array([2, 1, 0]), constraints(c, 5 * 8192))
    assert np.flatnonzero(chosen).tolist() == [3, 4, 5]


def test_one_chain_stops_where_its_next_offer_does_not_fit() -> None:
    c = lay_out([row(1.0, 1.0, 1.0)], GRID)
    items = Items(np.array([4, 4]), np.ones(2), np.array([0, 2, 3]), np.arange(3))
    assert not spend(c, items, np.arange(2), constraints(c, 8192)).any()
    apart = replace(items, chain=np.array([4, 5]))
    assert spend(c, apart, np.arange(2), constraints(c, 8192)).tolist() == [False, False, True]


def test_an_empty_list_buys_what_is_pinned() -> None:
    c = lay_out([row(1.0, 0.0), row(2.0, 2.0, position=1)], GRID)
    pinned = np.array([True, True, False, False])
    none = Items(np.zeros(0, np.int64), np.zeros(0), np.zeros(1, np.int64), np.zeros(0, np.int64))
    chosen = spend(c, none, np.zeros(0, np.int64), replace(constraints(c), pinned=pinned))
    assert chosen.tolist() == [True, False, False, False]
    assert joined([]).first.tolist() == [0]


def test_pins_that_cost_more_than_the_budget_are_refused() -> None:
    c = lay_out([row(1.0, 1.0), row(2.0, 2.0, position=1)], GRID)
    given = replace(constraints(c, 8192), pinned=np.array([True, True, False, False]))
    with pytest.raises(BudgetError, match=r"recipe pins.*at least 16384 bytes, found 8192"):
        choose(c, given, "conflict_aware")


def test_a_pin_overrides_an_exclusion_and_counts_against_the_share() -> None:
    c = lay_out([row(1.0, 1.0), row(2.0, 2.0, position=1)], GRID)
    pinned = np.array([True, False, False, False])
    given = Constraints(
        3 * 8192, np.array([8192, 8192]), pinned, np.array([True, True, False, False])
    )
    for strategy in ("magnitude", "conflict_aware", "hash"):
        chosen = choose(c, given, strategy)
        assert chosen[:2].tolist() == [True, False]
        assert chosen[2:].sum() == 1


@given(seed=SEEDS)
def test_what_is_not_free_is_in_no_chain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    c = lay_out(known(rng.normal(size=(3, 5, 64)), [1.0, -1.0, 2.0]), GRID)
    free = rng.random(len(c.row)) < 0.6
    items = chain_items(c, free)
    assert free[items.members].all()


def test_a_rehearsed_tensor_is_bought_by_its_curve() -> None:
    rows = [row(9.0, 1.0), row(4.0, 4.0, position=1)]
    falls_at_once = Curve(np.array([0.0, 0.5, 1.0]), np.array([1.0, 0.1, 0.0]), 2.0)
    falls_at_last = Curve(np.array([0.0, 0.5, 1.0]), np.array([1.0, 1.0, 0.0]), 2.0)
    items = chain_items(lay_out(rows, GRID, Drawn({0: falls_at_once})), np.ones(4, np.bool_))
    assert items.members.tolist() == [0, 2, 3, 1], "by squared norm at each output block"
    assert len(items.saved) == 4
    left = 2.0 * 13 * np.interp(9 / 13, falls_at_once.share, falls_at_once.residual)
    assert items.saved[:2].tolist() == pytest.approx([26 - left, left])
    items = chain_items(lay_out(rows, GRID, Drawn({0: falls_at_last})), np.ones(4, np.bool_))
    assert items.members.tolist() == [0, 2, 3, 1]
    assert items.first.tolist() == [0, 2, 3, 4], "both at once where one alone saves too little"
    assert items.saved.tolist() == pytest.approx([2.0 * 13, 2.0 * 3, 2.0 * 2])


def test_thousands_of_tensors_with_few_blocks_are_offered_once_each() -> None:
    rng = np.random.default_rng(0)
    rows = [row(*rng.random(2), position=p, tensor=t) for t in range(2000) for p in range(2)]
    c = lay_out(rows, GRID)
    items = chain_items(c, np.ones(len(c.row), np.bool_))
    assert np.sort(items.members).tolist() == list(range(8000))
    assert choose(c, constraints(c, 4000 * 8192), "conflict_aware").sum() == 4000
