"""Budgets in all their forms: amounts, errors to reach, pins, exclusions and shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.operator import Response
from mergepipe_pipeline.domain.output import is_kept
from mergepipe_pipeline.domain.recipe import Budget, Share
from mergepipe_pipeline.domain.recipe import Selection as Some
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.bounds import Sensitivity
from mergepipe_pipeline.planner.candidates import Choice, lay_out
from mergepipe_pipeline.planner.levels import LevelTable
from mergepipe_pipeline.planner.packed_rows import ORIGINAL
from mergepipe_pipeline.planner.samples import PARTS, STATED_ERRORS
from mergepipe_pipeline.planner.selection import PlanningProblem, Selection, estimates, select
from mergepipe_pipeline.planner.strategies import STRATEGIES, rank, spend
from tests.planner.drawn import GRID, constraints, known, originals, sampled

pytestmark = pytest.mark.usefixtures("baselines")

SEEDS = st.integers(0, 2**32)
TENSORS = ("embed", "layers.0.mlp", "layers.1.mlp")
EXPERTS = (("math",), ("code",), ("./experts/chat", "chat"))
STRATEGY = st.sampled_from(["magnitude", "hash"])


def problem(seed: int, response: Response = "additive") -> PlanningProblem:
    """Three experts of three tensors of a few blocks."""
    rng = np.random.default_rng(seed)
    rows, sensitivities, deltas_of = [], {}, {}
    reach = np.full(3, np.nan if response == "additive" else 1.0)
    for tensor in range(3):
        blocks = int(rng.integers(1, 7))
        deltas = rng.normal(size=(3, blocks, 64)) * np.exp(rng.normal(size=(3, blocks, 1)))
        deltas[rng.random((3, blocks)) < 0.1] = 0
        deltas_of[tensor] = deltas
        rows += known(deltas, rng.uniform(0.2, 1, 3).tolist(), tensor)
        sensitivities[tensor] = Sensitivity(response, reach, False)
    table = LevelTable(lay_out(rows, GRID))
    return PlanningProblem(
        table=table,
        sensitivities=sensitivities,
        samples={g.tensor: sampled(g.rows, deltas_of[g.tensor]) for g in table.candidates.groups()},
        tensors=TENSORS,
        experts=EXPERTS,
        block_elems=GRID.block_elems,
    )


def chosen_of(q: PlanningProblem, budget: Budget, strategy: str = "magnitude") -> Choice:
    chosen: Choice = select(q, budget, strategy).levels == ORIGINAL
    return chosen


def planned(q: PlanningProblem, choice: Choice) -> int:
    return int(q.candidates.nbytes[choice].sum())


@given(seed=SEEDS, strategy=STRATEGY, fraction=st.floats(0, 1))
def test_a_share_and_as_many_bytes_buy_the_same(seed: int, strategy: str, fraction: float) -> None:
    q = problem(seed)
    nbytes = int(fraction * q.candidates.nbytes.sum())
    by_share = chosen_of(q, Budget(fraction=fraction), strategy)
    assert (by_share == chosen_of(q, Budget(nbytes=nbytes), strategy)).all()
    assert planned(q, by_share) <= nbytes


@given(seed=SEEDS, strategy=STRATEGY)
def test_no_limit_and_no_error_buy_everything_useful(seed: int, strategy: str) -> None:
    q = problem(seed)
    for budget in (Budget(), Budget(error=0.0)):
        assert (chosen_of(q, budget, strategy) == ~q.candidates.zero).all()


@given(seed=SEEDS, strategy=STRATEGY, error=st.floats(0.01, 0.99))
def test_an_error_buys_the_cheapest_plan_on_the_list_whose_bound_is_within_it(
    seed: int, strategy: str, error: float
) -> None:
    q = problem(seed)
    c = q.candidates
    choice = chosen_of(q, Budget(error=error), strategy)
    found = estimates(Selection(q, strategy, originals(choice)), Budget(error=error))
    assert found.update_norm is not None
    assert found.error_bound is not None
    assert found.error_bound <= error * found.update_norm
    ranked = rank(q.table, STRATEGIES[strategy], ~c.zero)
    squares = q.squares([np.zeros(len(c.row), np.int8)])
    assert squares is not None
    off = STATED_ERRORS * squares.std(ddof=1) / PARTS**0.5
    allowed = error * max(0.0, float(squares.mean() - off)) ** 0.5
    none = np.zeros(len(c.row), np.int8)
    given = constraints(c)
    lists = [spend(q.table, ranked.first(n), given, none) for n in range(len(ranked.candidate) + 1)]
    within = [b is not None and b <= allowed for b in (q.bound(x).value for x in lists)]
    if True in within:
        assert (originals(choice) == lists[within.index(True)]).all()
    else:
        # What is on no list saves nothing by itself.
        assert (choice == ~c.zero).all()


@given(seed=SEEDS)
def test_a_smaller_error_never_costs_less(seed: int) -> None:
    q = problem(seed)
    costs = [planned(q, chosen_of(q, Budget(error=e))) for e in (0.01, 0.05, 0.2, 0.5, 0.9)]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("response", ["vote", "mean"])
@given(seed=SEEDS, error=st.floats(0.05, 0.95))
def test_an_error_holds_for_votes_and_means_too(
    response: Response, seed: int, error: float
) -> None:
    q = problem(seed, response)
    choice = chosen_of(q, Budget(error=error))
    found = estimates(Selection(q, "magnitude", originals(choice)), Budget(error=error))
    assert found.error_bound is not None
    assert found.update_norm is not None
    assert found.error_bound <= error * found.update_norm


def test_an_error_of_what_has_no_bound_is_refused() -> None:
    q = problem(0, "unbounded")
    with pytest.raises(BudgetError, match=r"no error can be promised.*error 0\.1: what is read"):
        chosen_of(q, Budget(error=0.1))


def test_an_error_that_exclusions_put_out_of_reach_is_refused() -> None:
    q = problem(1)
    excluded = Budget(error=0.01, exclude=(Some(("math",)),))
    with pytest.raises(BudgetError, match=r"not enough for its error.*a bound of at most"):
        chosen_of(q, excluded)
    shared = Budget(error=0.01, shares=(Share("*", nbytes=8192),))
    with pytest.raises(BudgetError, match=r"exclude less, raise the shares"):
        chosen_of(q, shared)


def rows_of(q: PlanningProblem, expert: str, tensor: str = "") -> Choice:
    """The candidates of an expert (and a tensor) by name."""
    c = q.candidates
    found = [expert in EXPERTS[r.position] and tensor in ("", TENSORS[r.tensor]) for r in c.rows]
    chosen: Choice = np.array(found)[c.row]
    return chosen


@given(seed=SEEDS, strategy=STRATEGY)
def test_what_is_pinned_is_bought_before_anything_else(seed: int, strategy: str) -> None:
    q = problem(seed)
    c = q.candidates
    pinned = rows_of(q, "code") & ~c.zero
    budget = Budget(nbytes=planned(q, pinned), pin=(Some(("code",)),))
    assert (chosen_of(q, budget, strategy) == pinned).all()
    more = chosen_of(q, Budget(nbytes=planned(q, pinned) + 8192, pin=budget.pin), strategy)
    assert more[pinned].all()
    assert more.sum() <= pinned.sum() + 1


@given(seed=SEEDS, strategy=STRATEGY, fraction=st.floats(0.1, 1))
def test_what_is_excluded_is_never_bought(seed: int, strategy: str, fraction: float) -> None:
    q = problem(seed)
    out = Some(("./experts/*",), ("layers.*",))
    choice = chosen_of(q, Budget(fraction=fraction, exclude=(out,)), strategy)
    for tensor in TENSORS[1:]:
        assert not (choice & rows_of(q, "./experts/chat", tensor)).any()
    whole = chosen_of(q, Budget(exclude=(out,)), strategy)
    assert (whole | q.candidates.zero | rows_of(q, "./experts/chat")).all()


@given(seed=SEEDS, strategy=STRATEGY, share=st.floats(0, 1))
def test_no_expert_takes_more_than_its_smallest_share(
    seed: int, strategy: str, share: float
) -> None:
    q = problem(seed)
    total = int(q.candidates.nbytes.sum())
    shares = (Share("*", fraction=share), Share("c*", nbytes=2 * 8192))
    choice = chosen_of(q, Budget(fraction=0.8, shares=shares), strategy)
    limit = int(share * int(0.8 * total))
    assert planned(q, choice & rows_of(q, "math")) <= limit
    assert planned(q, choice & rows_of(q, "code")) <= min(limit, 2 * 8192)


def test_patterns_are_of_shells_and_whole_names() -> None:
    budget = Budget(keep=("layers.*", "lm_head"))
    assert is_kept(budget, "layers.0.mlp")
    assert is_kept(budget, "lm_head")
    assert not is_kept(budget, "lm_head.weight")
    assert not is_kept(budget, "model.layers.0")
    assert not is_kept(Budget(), "layers.0")


def test_a_full_merge_that_shares_forbid_is_refused() -> None:
    with pytest.raises(BudgetError, match="does not cover a full merge"):
        chosen_of(problem(2), Budget(shares=(Share("*", nbytes=0),)), "full")


@given(seed=SEEDS, strategy=STRATEGY, fraction=st.floats(0, 1))
def test_estimates_count_what_is_bought(seed: int, strategy: str, fraction: float) -> None:
    q = problem(seed)
    c = q.candidates
    choice = chosen_of(q, Budget(fraction=fraction), strategy)
    found = estimates(Selection(q, strategy, originals(choice)), Budget(fraction=fraction))
    assert found.expert_bytes_planned == planned(q, choice)
    assert found.expert_bytes_total == c.nbytes.sum()
    assert (found.blocks_bought, found.blocks_zero) == (choice.sum(), c.zero.sum())
    assert found.blocks_total == len(c.row)
    runs = sum(
        len("".join("x" if b else " " for b in choice[cut]).split()) for cut in c.row_slices()
    )
    assert found.reads == runs
    assert found.budget_bytes == int(fraction * c.nbytes.sum())
    assert (found.error_bound == 0) == bool((choice | c.zero).all())


def test_blocks_are_bought_by_magnitude_unless_the_recipe_says() -> None:
    budget = Budget(fraction=0.4)
    assert select(problem(1), budget).strategy == "magnitude"
    assert select(problem(1), budget, "hash").strategy == "hash"
