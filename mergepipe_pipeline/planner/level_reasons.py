"""Why a block is read at its level: its place in the list of upgrades, and where that was cut.

As `reasons` does for whole blocks. A block's place is that of its last upgrade that was bought, or
else of its first.
"""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.arrays import I64Array
from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.planner.candidates import Choice
from mergepipe_pipeline.planner.constraints import Constraints
from mergepipe_pipeline.planner.level_selection import LevelSelection, upgrades_of
from mergepipe_pipeline.planner.packed_rows import NOTHING
from mergepipe_pipeline.planner.reasons import Account, reasons_of
from mergepipe_pipeline.planner.upgrades import Upgrades


def level_account(selection: LevelSelection, budget: Budget) -> Account:
    """Why levels that were selected under `budget` are what they are."""
    q, levels = selection.problem, selection.levels
    c, table, constraints = q.candidates, q.table, q.constraints(budget)
    upgrades = upgrades_of(q, constraints, evenly=budget.error is None)
    last, bought = _bought(selection, upgrades)
    first = np.zeros(len(c.row), np.int64)
    first[upgrades.candidate[::-1]] = np.arange(len(upgrades.candidate), 0, -1)
    place = np.where(last > 0, last, first)
    worth = np.append(0.0, upgrades.worth)[place]
    over = _share_spent(selection, upgrades, bought, constraints)
    missed = np.flatnonzero(~bought & ~over[upgrades.candidate])
    cut = int(missed[0]) if len(missed) else len(bought)
    return Account(
        candidates=c,
        levels=levels,
        nbytes_read=table.nbytes(levels),
        why=reasons_of(c, constraints, levels != NOTHING, place, cut, over, np.zeros_like(over)),
        place=place,
        worth=worth,
        together=np.ones(len(c.row), np.int64),
        items=len(bought),
        cut=cut,
        cut_worth=float(upgrades.worth[cut - 1]) if cut else None,
    )


def _bought(selection: LevelSelection, upgrades: Upgrades) -> tuple[I64Array, Choice]:
    """Per candidate the place of its last upgrade bought (0: none), and per upgrade if it was."""
    levels, table = selection.levels, selection.problem.table
    places = np.arange(1, len(upgrades.candidate) + 1)
    # What is exact has all its upgrades, on whatever way it came there.
    is_exact = (levels != NOTHING) & ~table.is_near(levels)
    reached = is_exact[upgrades.candidate] | (upgrades.level == levels[upgrades.candidate])
    last = np.zeros(len(levels), np.int64)
    last[upgrades.candidate[reached]] = places[reached]
    return last, places <= last[upgrades.candidate]


def _share_spent(
    selection: LevelSelection, upgrades: Upgrades, bought: Choice, constraints: Constraints
) -> Choice:
    """Candidates whose next upgrade is more than the rest of their expert's share."""
    c = selection.problem.candidates
    nbytes = selection.problem.table.nbytes(selection.levels)
    spent = np.bincount(c.expert, nbytes, len(constraints.caps))
    room = (constraints.caps - spent)[c.expert[upgrades.candidate]]
    over = np.zeros(len(c.row), np.bool_)
    dear = ~bought & (upgrades.nbytes > room)
    over[upgrades.candidate[dear]] = True
    return over
