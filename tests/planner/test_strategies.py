"""What a budget covers: every strategy stays within it, is deterministic, and reads all it can."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.candidates import Candidates, lay_out
from mergepipe_pipeline.planner.constraints import Constraints
from tests.planner.drawn import (
    GRID,
    Floats,
    candidates,
    choose,
    constraints,
    known,
    left_out,
    row,
)

pytestmark = pytest.mark.usefixtures("baselines")

PARTIAL = ["magnitude", "hash", "drop-experts"]


def buy(c: Candidates, budget: int | None, strategy: str) -> list[bool]:
    return [bool(b) for b in choose(c, constraints(c, budget), strategy)]


@pytest.mark.parametrize("strategy", PARTIAL)
@given(c=candidates(), share=st.floats(0, 1))
def test_a_choice_stays_within_the_budget_and_never_pays_for_zeros(
    strategy: str, c: Candidates, share: float
) -> None:
    given = constraints(c, int(share * c.nbytes.sum()))
    chosen = choose(c, given, strategy)
    assert c.nbytes[chosen].sum() <= given.budget_bytes
    assert not (chosen & c.zero).any()
    assert (choose(c, given, strategy) == chosen).all()


@pytest.mark.parametrize("strategy", PARTIAL)
@given(c=candidates(), share=st.floats(0, 1))
def test_a_bundle_is_bought_whole_or_not_at_all(strategy: str, c: Candidates, share: float) -> None:
    chosen = choose(c, constraints(c, int(share * c.nbytes.sum())), strategy)
    for r, cut in zip(c.rows, c.row_slices(), strict=True):
        if r.bundle_nbytes is not None:
            assert chosen[cut].all() or not chosen[cut].any()


@pytest.mark.parametrize("strategy", [*PARTIAL, "full"])
@given(c=candidates())
def test_a_budget_that_suffices_buys_everything_useful(strategy: str, c: Candidates) -> None:
    needed = int(c.nbytes[~c.zero].sum())
    for budget in (needed, needed + 1):
        assert buy(c, budget, strategy) == (~c.zero).tolist()


@pytest.mark.parametrize("strategy", ["magnitude", "hash"])
@given(c=candidates(), share=st.floats(0, 1))
def test_nothing_is_left_that_still_fits(strategy: str, c: Candidates, share: float) -> None:
    budget = int(share * c.nbytes.sum())
    chosen = choose(c, constraints(c, budget), strategy)
    bought = np.bincount(c.unit, chosen, c.n_units) > 0
    nbytes = np.bincount(c.unit, c.nbytes, c.n_units)
    left = budget - int(nbytes[bought].sum())
    assert (nbytes[~bought & ~c.unit_zero] > left).all()


@given(seed=st.integers(0, 2**32))
def test_for_equal_blocks_a_larger_budget_only_adds_to_the_choice(seed: int) -> None:
    c, _ = tensor(seed, experts=3, blocks=5, common=0.0)
    last = np.zeros(len(c.row), np.bool_)
    for budget in range(0, int(c.nbytes.sum()), 8192):
        chosen = choose(c, constraints(c, budget), "magnitude")
        assert (last <= chosen).all()
        last = chosen


def tensor(seed: int, *, experts: int, blocks: int, common: float) -> tuple[Candidates, Floats]:
    """A tensor whose deltas are known; `common` of each is shared with the others or opposed."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(1, blocks, 64)) * rng.choice([-1, 1], (experts, 1, 1))
    deltas = common * shared + (1 - common**2) ** 0.5 * rng.normal(size=(experts, blocks, 64))
    deltas *= np.exp(rng.normal(0, 0.7, (experts, blocks, 1)))
    return lay_out(known(deltas, rng.uniform(0.3, 1, experts).tolist()), GRID), deltas


def test_magnitude_errs_less_than_hash() -> None:
    for seed, share in product(range(6), (0.02, 0.05, 0.1, 0.25, 0.5, 0.9)):
        c, deltas = tensor(seed, experts=6, blocks=60, common=0.5)
        given = constraints(c, int(share * c.nbytes.sum()))
        best, chance = (left_out(c, deltas, choose(c, given, s)) for s in ("magnitude", "hash"))
        assert best < chance


def test_an_adapter_is_bought_for_its_factors_before_dearer_blocks() -> None:
    c = lay_out([row(3.0, 3.0), row(1.0, 1.0, position=1, bundle_nbytes=4000)], GRID)
    assert buy(c, 8192, "magnitude") == [False, False, True, True]
    assert buy(c, 4000 + 8192, "magnitude") == [True, False, True, True]
    # Too big for what is left: passed over, not read in part.
    assert buy(c, 3999, "magnitude") == [False] * 4


def test_a_bundle_of_no_bytes_is_bought_under_any_budget() -> None:
    unlike_its_base = row(1.0, 0.0, position=1, bundle_nbytes=0)
    c = lay_out([row(3.0, 3.0), unlike_its_base], GRID)
    for strategy in PARTIAL:
        assert buy(c, 0, strategy) == [False, False, True, True]


def test_dropping_experts_goes_by_the_order_of_the_recipe() -> None:
    rows = [
        row(1.0, 1.0, position=0),
        row(9.0, 9.0, position=1, bundle_nbytes=500),
        row(1.0, position=0, tensor=1),
        row(1.0, position=1, tensor=1, bundle_nbytes=300),
    ]
    c = lay_out(rows, GRID)
    first_only = [True, True, False, False, True, False]
    assert buy(c, 3 * 8192 + 299, "drop-experts") == first_only
    assert buy(c, 800, "drop-experts") == [not taken for taken in first_only]


def test_of_equal_candidates_the_first_in_the_list_is_bought() -> None:
    c = lay_out([row(1.0, 1.0, position=p) for p in range(3)], GRID)
    for n in range(6):
        assert np.flatnonzero(buy(c, n * 8192, "magnitude")).tolist() == list(range(n))


def test_pins_that_cost_more_than_the_budget_are_refused() -> None:
    c = lay_out([row(1.0, 1.0), row(2.0, 2.0, position=1)], GRID)
    given = replace(constraints(c, 8192), pinned=np.array([True, True, False, False]))
    with pytest.raises(BudgetError, match=r"recipe pins.*at least 16384 bytes, found 8192"):
        choose(c, given, "magnitude")


@pytest.mark.parametrize("strategy", PARTIAL)
def test_a_pin_overrides_an_exclusion_and_counts_against_the_share(strategy: str) -> None:
    c = lay_out([row(1.0, 1.0), row(2.0, 2.0, position=1)], GRID)
    pinned = np.array([True, False, False, False])
    given = Constraints(
        3 * 8192, np.array([8192, 8192]), pinned, np.array([True, True, False, False])
    )
    chosen = choose(c, given, strategy)
    assert chosen[:2].tolist() == [True, False]
    assert chosen[2:].sum() == 1


@pytest.mark.parametrize("strategy", ["magnitude"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_is_bought_first(strategy: str, value: float) -> None:
    broken = replace(row(9.0, 9.0, 9.0), block_l2sq=np.array([1.0, value, 2.0]))
    c = lay_out([broken, row(9.0, 9.0, 9.0, position=1)], GRID)
    assert buy(c, 8192, strategy) == [False, True, False, False, False, False]


def test_the_full_strategy_refuses_a_budget_that_is_too_small() -> None:
    with pytest.raises(BudgetError, match="at least 16384 bytes, found 100 bytes"):
        buy(lay_out([row(1.0, 1.0)], GRID), 100, "full")
    with pytest.raises(BudgetError, match="at least 700 bytes, found 100 bytes"):
        buy(lay_out([row(1.0, 1.0, bundle_nbytes=700)], GRID), 100, "full")


def test_the_full_strategy_names_a_share_that_is_too_small() -> None:
    c = lay_out([row(1.0, 1.0), row(1.0, 1.0, position=1)], GRID)
    given = replace(constraints(c, None), caps=np.array([1 << 40, 100]))
    with pytest.raises(BudgetError, match=r"share of an expert.*expert 2.* 16384 .* found 100 "):
        choose(c, given, "full")


@pytest.mark.parametrize("strategy", PARTIAL)
def test_a_partial_budget_without_statistics_is_refused(strategy: str) -> None:
    unknown = replace(row(1.0, 1.0), block_l2sq=None, block_nonzero=None)
    with pytest.raises(BudgetError, match=r"partial budget needs a base.*at least 16384 bytes"):
        buy(lay_out([unknown], GRID), 100, strategy)


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    names = "packs, magnitude, hash, drop-experts, full, found 'best'"
    with pytest.raises(BudgetError, match=names):
        buy(lay_out([row(1.0, 1.0)], GRID), 100, "best")
