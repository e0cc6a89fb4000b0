"""What a recipe's budget allows, in numbers: bytes in all and per expert, and which blocks.

Names and patterns end here; strategies see arrays only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from mergepipe_pipeline.arrays import I64Array
from mergepipe_pipeline.domain.recipe import Budget, Selection
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.candidates import Candidates, Choice

#: The names that one expert goes by.
Names = Sequence[str]


@dataclass(frozen=True)
class Constraints:
    """The limits of a plan: `budget_bytes` in all, `caps` [experts] bytes of each expert.

    `pinned` candidates are read first, `excluded` ones never.
    """

    budget_bytes: int
    caps: I64Array
    pinned: Choice
    excluded: Choice


def constraints_of(
    budget: Budget, c: Candidates, tensors: Sequence[str], experts: Sequence[Names]
) -> Constraints:
    """The limits that `budget` sets; by number, `tensors` are names and `experts`
    what a pattern may fit.

    No limit in bytes, as with an error to reach, is one of all bytes. A share of a budget without
    one is of all bytes too.
    """
    total = c.total_nbytes
    nbytes = budget.resolve(total)
    limit = total if nbytes is None else nbytes
    if limit >= total:  # all of it, as blocks cost one by one
        limit = max(limit, int(c.nbytes.sum()))
    caps = np.full(len(experts), np.iinfo(np.int64).max, np.int64)
    for number, names in enumerate(experts):
        for share in budget.shares:
            if _fits((share.experts,), names):
                own = share.nbytes if share.fraction is None else int(share.fraction * limit)
                caps[number] = caps[number] if own is None else min(caps[number], own)
    return Constraints(
        limit,
        caps,
        _selected(budget.pin, c, tensors, experts),
        _selected(budget.exclude, c, tensors, experts),
    )


def lacks_base(needed: int, budget_bytes: int) -> BudgetError:
    """The error for a budget that leaves out some of what nothing stands in for."""
    return BudgetError(
        "A partial budget needs a base model that stands in for what is not read",
        where="budget",
        expected=f"a base_model, or at least {needed} bytes",
        found=f"{budget_bytes} bytes and no base_model",
        next_step="add base_model to the recipe, or drop the budget",
    )


def _selected(
    selections: Sequence[Selection], c: Candidates, tensors: Sequence[str], experts: Sequence[Names]
) -> Choice:
    rows = [
        any(
            _fits(s.experts, experts[r.position]) and _fits(s.tensors, (tensors[r.tensor],))
            for s in selections
        )
        for r in c.rows
    ]
    selected: Choice = np.array(rows, np.bool_)[c.row]
    return selected


def _fits(patterns: Sequence[str], names: Names) -> bool:
    return not patterns or any(fnmatchcase(name, p) for p in patterns for name in names)
