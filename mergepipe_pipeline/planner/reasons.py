"""Why a block is read or not: its place in the strategy's list, and where the list was cut.

Explains a choice that was made; decides nothing. Every block has one of the reasons in `Why`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mergepipe_pipeline.arrays import F64Array, I64Array
from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.planner.candidates import Candidates, Choice
from mergepipe_pipeline.planner.constraints import Constraints
from mergepipe_pipeline.planner.items import Items
from mergepipe_pipeline.planner.levels import Levels, level_name, originals
from mergepipe_pipeline.planner.selection import PlanningProblem
from mergepipe_pipeline.planner.strategies import allowed, rank

Why = Literal[
    "bought",
    "fills the rest",
    "pinned",
    "zero",
    "excluded",
    "saves nothing",
    "share spent",
    "waits",
    "below the cut",
]
#: What each reason means.
MEANING: dict[Why, str] = {
    "bought": "its place in the list is within the budget",
    "fills the rest": "below the cut, but it fits into what was left of the budget",
    "pinned": "the recipe has it bought first",
    "zero": "the expert equals the base here: nothing to read",
    "excluded": "the recipe has it never bought",
    "saves nothing": "reading it would not bring the result nearer to the full merge",
    "share spent": "its expert's share of the budget was used up",
    "waits": "it builds on one that an expert's share left out",
    "below the cut": "the budget ended before its place in the list",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One candidate, in bytes; `change` is ‖c·δ‖₂, what it adds to the result by itself.

    It is read with `together` − 1 others. `worth`: the squared error that the item saves per
    byte. `place`: in the strategy's list, from 1. Both None for what is on no list. `level`: what
    of its pack is read, for `nbytes_read` bytes; "stored" for its stored elements, "" for nothing.
    """

    expert: int
    block: int
    nbytes: int
    change: float
    why: Why
    place: int | None
    worth: float | None
    together: int
    level: str
    nbytes_read: int

    @property
    def is_read(self) -> bool:
        """Whether the plan reads it."""
        return self.why in ("bought", "fills the rest", "pinned")


@dataclass(frozen=True, kw_only=True)
class Account:
    """A strategy's list against a choice, per candidate; `place` 0: on no list.

    A candidate is read at its level in `levels` for `nbytes_read` bytes. `items` is the length of
    the list. Up to the place `cut` the budget allowed everything; the last item before it was worth
    `cut_worth` (None: there was none).
    """

    candidates: Candidates
    levels: Levels
    nbytes_read: I64Array
    why: tuple[Why, ...]
    place: I64Array
    worth: F64Array
    together: I64Array
    items: int
    cut: int
    cut_worth: float | None

    def blocks(self, tensor: int) -> Iterator[Block]:
        """The candidates of one output tensor, expert by expert."""
        c = self.candidates
        change = np.sqrt(c.gain)
        for row, cut in zip(c.rows, c.row_slices(), strict=True):
            for n in range(cut.start, cut.stop) if row.tensor == tensor else ():
                place = int(self.place[n])
                yield Block(
                    expert=row.position,
                    block=int(c.block[n]),
                    nbytes=int(c.nbytes[n]),
                    change=float(change[n]),
                    why=self.why[n],
                    place=place or None,
                    worth=float(self.worth[n]) if place else None,
                    together=int(self.together[n]),
                    level=level_name(int(self.levels[n])),
                    nbytes_read=int(self.nbytes_read[n]),
                )


def reasons_of(
    c: Candidates,
    constraints: Constraints,
    chosen: Choice,
    place: I64Array,
    cut: int,
    over: Choice,
    waits: Choice,
) -> tuple[Why, ...]:
    """Why each candidate is read or not; places up to `cut` were paid in their turn."""
    cases: list[tuple[Choice, Why]] = [
        (c.zero, "zero"),
        (constraints.pinned, "pinned"),
        (constraints.excluded, "excluded"),
        (chosen & (place <= cut), "bought"),
        (chosen, "fills the rest"),
        (place == 0, "saves nothing"),
        (over, "share spent"),
        (waits & (place <= cut), "waits"),
    ]
    code = np.select([mask for mask, _ in cases], range(len(cases)), len(cases))
    names: list[Why] = [*(name for _, name in cases), "below the cut"]
    return tuple(names[n] for n in code.tolist())


def account(q: PlanningProblem, budget: Budget, ranking: str, choice: Choice) -> Account:
    """Why `choice`, made under `budget` down the list of strategy `ranking`, is what it is.

    `full` keeps no list. Raises BudgetError for an unknown strategy.
    """
    c, constraints = q.candidates, q.constraints(budget)
    # All are [candidates]; the list has [items], each of `counts` candidates in `members`.
    place, worth = np.zeros(len(c.row), np.int64), np.zeros(len(c.row))
    together = np.ones(len(c.row), np.int64)
    over, waits = np.zeros(len(c.row), np.bool_), np.zeros(len(c.row), np.bool_)
    cut, cut_worth, length = 0, None, 0
    if ranking != "full":
        free = allowed(c, constraints) & ~constraints.pinned
        listed = _listed(c, constraints, choice, *rank(c, ranking, free, q.seek_nbytes))
        counts, members = np.diff(listed.items.first), listed.items.members
        place[members] = np.repeat(listed.place, counts)
        worth[members] = np.repeat(listed.worth, counts)
        together[members] = np.repeat(counts, counts)
        over[members] = np.repeat(listed.is_over, counts)
        waits[members] = np.repeat(listed.waits, counts)
        cut, cut_worth, length = listed.cut, listed.cut_worth, len(counts)
    return Account(
        candidates=c,
        levels=originals(choice),
        nbytes_read=np.where(choice, c.nbytes, 0),
        why=reasons_of(c, constraints, choice, place, cut, over, waits),
        place=place,
        worth=worth,
        together=together,
        items=length,
        cut=cut,
        cut_worth=cut_worth,
    )


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """The items of a list: places from 1, worths, and why some were not taken."""

    items: Items
    place: I64Array
    worth: F64Array
    is_over: Choice
    waits: Choice
    cut: int
    cut_worth: float | None


def _listed(
    c: Candidates, constraints: Constraints, choice: Choice, items: Items, order: I64Array
) -> _Listed:
    length = len(order)
    place = np.empty(length, np.int64)
    place[order] = np.arange(1, length + 1)
    starts, members = items.first[:-1], items.members
    if not length:
        none = np.zeros(0, np.bool_)
        return _Listed(
            items=items,
            place=place,
            worth=np.zeros(0),
            is_over=none,
            waits=none,
            cut=0,
            cut_worth=None,
        )
    worth = items.saved / np.maximum(np.add.reduceat(c.nbytes[members], starts), 1)
    taken = choice[members[starts]]
    spent = np.bincount(c.expert[choice], c.nbytes[choice], len(constraints.caps))
    dear = c.unit_nbytes[c.unit] > (constraints.caps - spent)[c.expert]
    is_over = ~taken & np.logical_or.reduceat(dear[members], starts)
    _, chain = np.unique(items.chain, return_inverse=True)
    stopped = np.full(int(chain.max()) + 1, length + 1)
    np.minimum.at(stopped, chain[~taken], place[~taken])
    waits = ~taken & (place > stopped[chain])
    cut = int(place[~taken & ~is_over & ~waits].min(initial=length + 1)) - 1
    before = taken & (place <= cut)
    last = int(np.where(before, place, 0).argmax())
    cut_worth = float(worth[last]) if before.any() else None
    return _Listed(
        items=items,
        place=place,
        worth=worth,
        is_over=is_over,
        waits=waits,
        cut=cut,
        cut_worth=cut_worth,
    )
