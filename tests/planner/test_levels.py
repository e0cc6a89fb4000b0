"""Levels of packs under a budget: never more than it allows, and as good as levels can be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, FACTORED, TIERS
from mergepipe_pipeline.domain.plan import TrimRule
from mergepipe_pipeline.domain.recipe import Budget, Selection, Share
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.packs.index import NO_TAILS, summed
from mergepipe_pipeline.planner.candidates import Row, lay_out
from mergepipe_pipeline.planner.levels import Levels, LevelTable, packed_input
from mergepipe_pipeline.planner.packed_rows import (
    LAST_NEAR,
    N_RUNGS,
    NOTHING,
    ORIGINAL,
    packed_row,
    row_levels,
)
from mergepipe_pipeline.planner.selection import PlanningProblem, select
from mergepipe_pipeline.planner.strategies import PACKS, STRATEGIES, Ranked, rank
from tests.planner.levelled import GRID, levels_of, problem, tables
from tests.support.laws import examples

PATTERN = st.sampled_from(["*", "e0", "e1"])
SELECTIONS = st.lists(
    st.builds(lambda e, t: Selection((e,), (t,)), PATTERN, st.sampled_from(["*", "t0", "t1"])),
    max_size=1,
)


def select_levels(q: PlanningProblem, budget: Budget) -> Levels:
    return select(q, budget).levels


def ranked_upgrades(table: LevelTable, free: np.ndarray) -> Ranked:
    return rank(table, STRATEGIES[PACKS], free)


@given(
    table=tables(),
    fraction=st.floats(0, 1.1),
    pin=SELECTIONS,
    exclude=SELECTIONS,
    share=st.none() | st.floats(0, 1),
)
def test_levels_cost_no_more_than_the_budget_and_the_shares_allow(
    table: LevelTable,
    fraction: float,
    pin: list[Selection],
    exclude: list[Selection],
    share: float | None,
) -> None:
    shares = () if share is None else (Share("e0", fraction=share),)
    budget = Budget(fraction=fraction, pin=tuple(pin), exclude=tuple(exclude), shares=shares)
    q, c = problem(table), table.candidates
    constraints = q.constraints(budget)
    pinned = np.where(constraints.pinned, table.cheapest, np.int8(NOTHING))
    dear = int(table.nbytes(pinned).sum())
    try:
        levels = select_levels(q, budget)
    except BudgetError:
        assert dear > constraints.budget_bytes
        return
    nbytes = table.nbytes(levels)
    assert nbytes.sum() <= constraints.budget_bytes
    own = np.bincount(c.expert, nbytes, len(constraints.caps))
    first = np.bincount(c.expert, table.nbytes(pinned), len(constraints.caps))
    assert (own <= np.maximum(constraints.caps, first)).all()
    assert (levels[constraints.excluded & ~constraints.pinned] == NOTHING).all()
    assert (levels[c.zero] == NOTHING).all()
    assert not table.residual_sq(levels)[constraints.pinned].any()
    for row, cut in zip(c.rows, c.row_slices(), strict=True):
        if row.bundle_nbytes is not None:
            assert len(set(levels[cut].tolist())) <= 1
        if row.levels is None:
            assert set(levels[cut].tolist()) <= {NOTHING, ORIGINAL}
        elif row.levels.packed.factors:
            read = set(levels[cut].tolist())
            rungs = {level for level in read if NOTHING < level <= N_RUNGS}
            # One rung for all blocks, and the last where anything is read that goes on from it.
            goes_on = any(N_RUNGS < level <= LAST_NEAR for level in read)
            assert len(rungs) <= 1
            assert not goes_on or rungs <= {N_RUNGS}


def saved(table: LevelTable, levels: np.ndarray) -> float:
    """What levels save of a sum's blocks of equal length, as a budget counts it."""
    c = table.candidates
    known = table.delta_sq > 0
    left = np.divide(table.residual_sq(levels), table.delta_sq, where=known, out=0 * c.sq_norm)
    return float(CHUNK_ELEMS * (np.sqrt(c.sq_norm / c.sq_norm.mean()) * (1 - left))[known].sum())


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32), fraction=st.floats(0, 1))
def test_what_a_budget_buys_is_within_one_upgrade_of_the_best_there_is(
    seed: int, fraction: float
) -> None:
    rng = np.random.default_rng(seed)
    l2sq = rng.random(3)
    row = Row(
        tensor=0,
        position=0,
        name="t0#0",
        numel=3 * CHUNK_ELEMS,
        itemsize=2,
        coefficient=1.0,
        block_l2sq=l2sq,
        block_nonzero=np.ones(3, np.int64),
        levels=levels_of(rng, l2sq),
    )
    table = LevelTable(lay_out([row], GRID))
    found = select_levels(problem(table), Budget(fraction=fraction))
    limit, best = int(fraction * table.candidates.nbytes.sum()), 0.0
    of = row.levels
    assert of is not None
    can = [
        [NOTHING, ORIGINAL]
        + [
            1 + k
            for k in range(len(TIERS))
            if of.usable[k] and np.isfinite(of.packed.residual_sq[k, b])
        ]
        for b in range(3)
    ]
    for choice in product(*can):
        levels = np.array(choice, np.int8)
        if table.nbytes(levels).sum() <= limit:
            best = max(best, saved(table, levels))
    upgrades = ranked_upgrades(table, np.ones(3, np.bool_))
    # What the list saves up to each upgrade: no step is larger than the largest of them.
    reached, steps = np.zeros(3, np.int8), [0.0]
    for candidate, level in zip(upgrades.candidate, upgrades.level, strict=True):
        reached[candidate] = level
        steps.append(saved(table, reached))
    largest = float(np.diff(steps).max(initial=0.0))
    assert best - largest - 1e-6 <= saved(table, found) <= best + 1e-6


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([2.0**-10, 1.0, 2.0**10]))
def test_all_places_and_all_experts_of_like_strength_reach_a_level_before_any_the_next(
    seed: int, scale: float
) -> None:
    levels = levels_of(np.random.default_rng(seed), np.ones(1))
    scaled = replace(
        levels, packed=replace(levels.packed, residual_sq=scale * levels.packed.residual_sq)
    )
    rows = [
        Row(
            tensor=tensor,
            position=position,
            name=f"t{tensor}#{position}",
            numel=CHUNK_ELEMS,
            itemsize=2,
            coefficient=coefficient,
            block_l2sq=np.full(1, l2sq),
            block_nonzero=np.ones(1, np.int64),
            is_sum=False,
            levels=of,
        )
        for tensor, l2sq, of in ((0, 1.0, levels), (1, scale, scaled))
        for position, coefficient in enumerate((0.5, 1.5, 0.1))
    ]
    table = LevelTable(lay_out(rows, GRID))
    upgrades = ranked_upgrades(table, np.ones(6, np.bool_))
    strong = upgrades.candidate % 3 != 2
    for reached in np.split(upgrades.level[strong], max(1, strong.sum() // 4)):
        assert len(set(reached.tolist())) == 1
    # The third is so much weaker that its first level comes after the others'.
    assert strong[:4].all()


@given(table=tables())
def test_where_everything_fits_it_is_exact_and_read_from_wherever_it_is_fewer_bytes(
    table: LevelTable,
) -> None:
    levels = select_levels(problem(table), Budget())
    assert not table.residual_sq(levels).any()
    nbytes, c = table.nbytes(levels), table.candidates
    # Factors, which exact levels need, are counted with a row's first block.
    for cut in c.row_slices():
        assert nbytes[cut].sum() <= c.nbytes[cut].sum()
    tight = select_levels(problem(table), Budget(nbytes=int(nbytes.sum())))
    assert (tight == levels).all()


def test_stored_blocks_are_bought_where_an_exact_level_is_dearer_by_the_factors_it_needs() -> None:
    n, stored = 4, 2 * CHUNK_ELEMS
    nbytes = np.zeros((len(TIERS), n), np.uint32)
    residual_sq = np.full((len(TIERS), n), np.inf, np.float32)
    nbytes[TIERS.index("X")], nbytes[0, 0], residual_sq[TIERS.index("X")] = stored - 1000, 20_000, 0
    packed = packed_row(0, "w", 1.0, "f", 7, NO_TAILS, nbytes, residual_sq)
    row = Row(
        tensor=0,
        position=0,
        name="t0#0",
        numel=n * CHUNK_ELEMS,
        itemsize=2,
        coefficient=1.0,
        block_l2sq=np.ones(n),
        block_nonzero=np.ones(n, np.int64),
        levels=row_levels(packed, None, approximates=False),
    )
    table = LevelTable(lay_out([row], GRID))
    assert (table.cheapest == ORIGINAL).all()
    levels = select_levels(problem(table), Budget(nbytes=2 * stored))
    assert sorted(levels.tolist()) == [NOTHING, NOTHING, ORIGINAL, ORIGINAL]


@pytest.mark.parametrize("is_sum", [False, True])
def test_a_vector_is_bought_before_a_matrix_of_as_many_bytes(is_sum: bool) -> None:
    rows = [
        Row(
            tensor=number,
            position=0,
            name=f"t{number}#0",
            numel=576,
            itemsize=2,
            coefficient=1.0,
            block_l2sq=np.array([l2sq]),
            block_nonzero=np.array([576]),
            is_sum=is_sum,
            is_vector=is_vector,
        )
        for number, (l2sq, is_vector) in enumerate([(2.0, False), (1.0, True)])
    ]
    table = LevelTable(lay_out(rows, GRID))
    assert ranked_upgrades(table, np.ones(2, np.bool_)).candidate.tolist() == [1, 0]


@given(table=tables(), fraction=st.floats(0, 1))
def test_what_a_plan_reads_of_a_pack_is_what_was_chosen(table: LevelTable, fraction: float) -> None:
    levels = select_levels(problem(table), Budget(fraction=fraction))
    nbytes, c = table.nbytes(levels), table.candidates
    for row, cut in zip(c.rows, c.row_slices(), strict=True):
        own = levels[cut]
        packed = packed_input(row, own, GRID.block_elems)
        ranges = packed.ranges if packed else ()
        assert (packed.nbytes if packed else 0) == nbytes[cut][own != ORIGINAL].sum()
        shown = np.zeros(len(own), np.int8)
        for r in ranges:
            assert r.start_elem < r.stop_elem <= row.numel
            shown[r.start_elem // CHUNK_ELEMS : -(-r.stop_elem // CHUNK_ELEMS)] = 1 + TIERS.index(
                r.level
            )
        assert np.array_equal(shown, np.where(own == ORIGINAL, NOTHING, own))
        for a, b in pairwise(ranges):
            assert a.stop_elem <= b.start_elem
            assert (a.stop_elem, a.level) != (b.start_elem, b.level)


def test_blocks_have_the_bytes_and_residuals_of_their_chunks() -> None:
    rng = np.random.default_rng(3)
    nbytes = rng.integers(0, 9999, (len(TIERS), 10)).astype(np.uint32)
    residual_sq = rng.random((len(TIERS), 10), dtype=np.float32)
    residual_sq[0, 9] = np.inf
    found = packed_row(0, "w", 1.0, "f", 7, NO_TAILS, *summed(nbytes, residual_sq, 4))
    wanted = np.add.reduceat(nbytes, [0, 4, 8], axis=1).astype(np.int64)
    assert np.array_equal(found.rung_nbytes, wanted[:3].sum(axis=1).cumsum())
    assert not found.nbytes[: len(FACTORED)].any()
    assert np.array_equal(found.nbytes[TIERS.index("L2")], wanted[3:6].sum(axis=0))
    for number in (-2, -1):  # X20 and X are read alone, of blocks
        assert np.array_equal(found.nbytes[number], wanted[number])
    exact = np.add.reduceat(residual_sq.astype(np.float64), [0, 4, 8], axis=1)
    assert (found.residual_sq >= exact).all()
    assert np.isinf(found.residual_sq[0, 2])
    assert np.isfinite(found.residual_sq[1:]).all()


PACKED = packed_row(
    0,
    "w",
    1.0,
    "",
    100,
    NO_TAILS,
    np.ones((len(TIERS), 1), np.uint32),
    np.ones((len(TIERS), 1), np.float32),
)


def test_x20_is_exact_for_a_trim_that_keeps_no_more_than_it_holds() -> None:
    x20 = TIERS.index("X20")
    for bits, is_exact in ((99, False), (100, True), (101, True)):
        levels = row_levels(PACKED, TrimRule(bits, 5), approximates=True)
        assert levels.exact[x20] == is_exact
    assert not row_levels(PACKED, None, approximates=True).exact[x20]
