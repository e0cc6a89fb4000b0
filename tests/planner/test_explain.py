"""Why blocks were read or left: reasons agree with the choice, with the list and with its cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.recipe import Budget, Selection, Share
from mergepipe_pipeline.planner.reasons import MEANING, Account, Block, account
from mergepipe_pipeline.planner.selection import select_blocks
from mergepipe_pipeline.planner.strategies import STRATEGIES
from tests.planner.test_selection import SEEDS, TENSORS, problem

STRATEGY = st.sampled_from([*STRATEGIES])


def blocks_of(told: Account) -> list[Block]:
    return [b for n in range(len(TENSORS)) for b in told.blocks(n)]


@given(seed=SEEDS, strategy=STRATEGY, fraction=st.floats(0, 1))
def test_the_budget_allows_everything_up_to_the_cut_and_not_what_comes_next(
    seed: int, strategy: str, fraction: float
) -> None:
    q, budget = problem(seed), Budget(fraction=fraction)
    choice = select_blocks(q, budget, strategy).choice
    told = account(q, budget, strategy, choice)
    blocks = blocks_of(told)
    assert len(blocks) == len(choice)
    assert [b.is_read for b in blocks] == choice.tolist()
    assert [b.why == "zero" for b in blocks] == q.candidates.zero.tolist()
    for b in blocks:
        if b.place:
            is_before = b.place <= told.cut
            assert b.why in (("bought",) if is_before else ("fills the rest", "below the cut"))
    following = [b for b in blocks if b.place == told.cut + 1]
    before = sum(b.nbytes for b in blocks if b.why == "bought")
    if following:
        cost = sum(b.nbytes for b in following)
        assert before + cost > int(fraction * q.candidates.nbytes.sum())
    assert {b.why for b in blocks} <= set(MEANING)


@given(seed=SEEDS, fraction=st.floats(0.1, 1), share=st.floats(0, 0.4))
def test_what_a_share_left_out_before_the_cut_is_told_from_what_the_budget_did(
    seed: int, fraction: float, share: float
) -> None:
    q = problem(seed)
    budget = Budget(fraction=fraction, shares=(Share("code", fraction=share),))
    choice = select_blocks(q, budget, "conflict_aware").choice
    told = account(q, budget, "conflict_aware", choice)
    for b in blocks_of(told):
        if b.place and b.place <= told.cut:
            assert b.why in ("bought", "share spent", "waits")
        if b.why == "share spent" and b.together == 1:
            assert b.expert == 1


@pytest.mark.parametrize("strategy", ["conflict_aware", "magnitude"])
@given(seed=SEEDS)
def test_worth_falls_along_the_list(strategy: str, seed: int) -> None:
    q = problem(seed)
    nothing = np.zeros(len(q.candidates.row), np.bool_)
    told = account(q, Budget(nbytes=0), strategy, nothing)
    on_list = [(b.place, b.worth) for b in blocks_of(told) if b.place and b.worth is not None]
    worths = [worth for _, worth in sorted(on_list)]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(worths))
    assert (told.cut, told.cut_worth) == (0, None)


@given(seed=SEEDS)
def test_a_block_alone_is_worth_its_squared_change_per_byte(seed: int) -> None:
    q = problem(seed)
    told = account(q, Budget(), "magnitude", select_blocks(q, Budget(), "magnitude").choice)
    for b in blocks_of(told):
        if b.worth is not None:
            assert b.worth == pytest.approx(b.change**2 / b.nbytes)


@given(seed=SEEDS)
def test_pins_exclusions_and_shares_are_told_as_such(seed: int) -> None:
    q = problem(seed)
    budget = Budget(
        fraction=0.9,
        pin=(Selection(("math",), ("embed",)),),
        exclude=(Selection((), ("layers.0.mlp",)),),
        shares=(Share("code", nbytes=0),),
    )
    told = account(q, budget, "conflict_aware", select_blocks(q, budget, "conflict_aware").choice)
    for tensor, name in enumerate(TENSORS):
        for b in told.blocks(tensor):
            if b.why == "zero":
                continue
            if name == "embed" and b.expert == 0:
                assert b.why == "pinned"
            elif name == "layers.0.mlp":
                assert b.why == "excluded"
            elif b.expert == 1:
                # What only helps together with others may be on no list of its own.
                assert b.why in ("share spent", "saves nothing")


def test_the_full_strategy_keeps_no_list() -> None:
    q = problem(0)
    told = account(q, Budget(), "full", select_blocks(q, Budget(), "full").choice)
    assert (told.items, told.cut) == (0, 0)
    assert {b.why for b in blocks_of(told)} <= {"bought", "zero"}
    assert all(b.place is None and b.worth is None for b in blocks_of(told))
