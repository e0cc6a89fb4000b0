"""What a budget buys: every strategy within it, deterministic, and everything when it suffices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.candidates import Candidates, lay_out
from mergepipe_pipeline.planner.strategies import STRATEGIES, choose
from tests.planner.drawn import GRID, candidates, row

PARTIAL = [s for s in STRATEGIES if s != "full"]


@pytest.mark.parametrize("strategy", PARTIAL)
@given(c=candidates(), share=st.floats(0, 1))
def test_a_choice_stays_within_the_budget_and_never_pays_for_zeros(
    strategy: str, c: Candidates, share: float
) -> None:
    budget = int(share * c.nbytes.sum())
    chosen = choose(c, budget, strategy)
    assert c.nbytes[chosen].sum() <= budget
    assert not (chosen & c.zero).any()
    assert (choose(c, budget, strategy) == chosen).all()


@pytest.mark.parametrize("strategy", PARTIAL)
@given(c=candidates(), share=st.floats(0, 1))
def test_a_bundle_is_bought_whole_or_not_at_all(strategy: str, c: Candidates, share: float) -> None:
    chosen = choose(c, int(share * c.nbytes.sum()), strategy)
    for r, cut in zip(c.rows, c.row_slices(), strict=True):
        if r.bundle_nbytes is not None:
            assert chosen[cut].all() or not chosen[cut].any()


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@given(c=candidates())
def test_a_budget_that_suffices_buys_everything_useful(strategy: str, c: Candidates) -> None:
    needed = int(c.nbytes[~c.zero].sum())
    for budget in (None, needed, needed + 1):
        assert (choose(c, budget, strategy) == ~c.zero).all()


@pytest.mark.parametrize("strategy", ["magnitude", "hash"])
@given(c=candidates(), share=st.floats(0, 1))
def test_nothing_is_left_that_still_fits(strategy: str, c: Candidates, share: float) -> None:
    budget = int(share * c.nbytes.sum())
    chosen = choose(c, budget, strategy)
    bought = np.bincount(c.unit, chosen, c.n_units) > 0
    left = budget - int(c.unit_nbytes[bought].sum())
    assert (c.unit_nbytes[~bought & ~c.unit_zero] > left).all()


def test_magnitude_buys_an_adapter_for_its_factors_before_dearer_blocks() -> None:
    c = lay_out([row(3.0, 3.0), row(1.0, 1.0, position=1, bundle_nbytes=4000)], GRID)
    assert choose(c, 8192, "magnitude").tolist() == [False, False, True, True]
    assert choose(c, 4000 + 8192, "magnitude").tolist() == [True, False, True, True]
    # Too big for what is left: passed over, not bought in part.
    assert choose(c, 3999, "magnitude").tolist() == [False] * 4


def test_a_bundle_of_no_bytes_is_bought_under_any_budget() -> None:
    unlike_its_base = row(1.0, 0.0, position=1, bundle_nbytes=0)
    c = lay_out([row(3.0, 3.0), unlike_its_base], GRID)
    for strategy in PARTIAL:
        assert choose(c, 0, strategy).tolist() == [False, False, True, True]


def test_dropping_experts_takes_all_of_an_adapter_in_recipe_order() -> None:
    rows = [
        row(1.0, 1.0, position=0),
        row(9.0, 9.0, position=1, bundle_nbytes=500),
        row(1.0, position=0, tensor=1),
        row(1.0, position=1, tensor=1, bundle_nbytes=300),
    ]
    c = lay_out(rows, GRID)
    assert choose(c, 3 * 8192 + 799, "drop-experts").tolist() == [
        True,
        True,
        False,
        False,
        True,
        False,
    ]
    assert choose(c, 800, "drop-experts").tolist() == [False, False, True, True, False, True]


def test_the_full_strategy_refuses_a_budget_that_is_too_small() -> None:
    with pytest.raises(BudgetError, match="at least 16384 bytes, found 100 bytes"):
        choose(lay_out([row(1.0, 1.0)], GRID), 100, "full")
    with pytest.raises(BudgetError, match="at least 700 bytes, found 100 bytes"):
        choose(lay_out([row(1.0, 1.0, bundle_nbytes=700)], GRID), 100, "full")


def test_a_partial_budget_without_statistics_is_refused() -> None:
    unknown = replace(row(1.0, 1.0), block_l2sq=None, block_max_abs=None, block_nonzero=None)
    with pytest.raises(BudgetError, match=r"partial budget needs a base.*at least 16384 bytes"):
        choose(lay_out([unknown], GRID), 100, "magnitude")


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BudgetError, match=r"full, magnitude, hash, drop-experts, found 'best'"):
        choose(lay_out([row(1.0)], GRID), None, "best")
