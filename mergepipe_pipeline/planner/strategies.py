"""How a budget is spent: each strategy ranks the items that can be read.

Every strategy stays within the budget, is deterministic, and never pays for a block whose delta is
known to be zero.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mergepipe_pipeline.arrays import I64Array
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.candidates import Candidates, Choice
from mergepipe_pipeline.planner.constraints import Constraints, lacks_base
from mergepipe_pipeline.planner.items import Items, chain_items, joined, single_items, spend

#: Items with their order: best first, and within a chain as the chain goes.
Ranked = tuple[Items, I64Array]
Strategy = Callable[[Candidates, Choice], Ranked]


def rank(c: Candidates, strategy: str, free: Choice) -> Ranked:
    """What the strategy would read from the candidates in `free`, best first.

    Raises BudgetError for an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise BudgetError(
            "Unknown strategy",
            where="strategy",
            expected=", ".join((*STRATEGIES, "full")),
            found=repr(strategy),
            next_step="use conflict_aware",
        )
    return STRATEGIES[strategy](c, free)


def choose(c: Candidates, constraints: Constraints, strategy: str) -> Choice:
    """Which candidates to read: everything useful if it fits, else what the strategy picks.

    Raises BudgetError for an unknown strategy, for `full` under a budget that is too small, for
    pinned blocks that cost more than the budget, and for a partial budget without a base to stand
    in for what is not read.
    """
    useful = allowed(c, constraints)
    needed = int(c.nbytes[useful].sum())
    if is_affordable(c, useful, constraints):
        return useful
    if strategy == "full":
        raise _no_full_merge(c, useful, constraints)
    refuse_without_base(c, needed, constraints.budget_bytes)
    refuse_dear_pins(c, constraints)
    items, order = rank(c, strategy, useful & ~constraints.pinned)
    return spend(c, items, order, constraints)


def _no_full_merge(c: Candidates, useful: Choice, constraints: Constraints) -> BudgetError:
    """The error for a budget, or else an expert's share, that is less than all there is."""
    own = np.bincount(c.expert[useful], c.nbytes[useful], len(constraints.caps)).astype(np.int64)
    needed, limit, what, where = int(own.sum()), constraints.budget_bytes, "budget", "budget"
    if needed <= limit:
        number = int(np.argmax(own > constraints.caps))
        needed, limit = int(own[number]), int(constraints.caps[number])
        what, where = "share of an expert", f"budget, shares, of expert {number + 1}"
    return BudgetError(
        f"The {what} does not cover a full merge",
        where=where,
        expected=f"at least {needed} bytes",
        found=f"{limit} bytes",
        next_step=f"raise the {what}, or use strategy conflict_aware",
    )


def allowed(c: Candidates, constraints: Constraints) -> Choice:
    """What is worth reading if there is no limit in bytes."""
    return ~c.zero & ~(constraints.excluded & ~constraints.pinned)


def is_affordable(c: Candidates, choice: Choice, constraints: Constraints) -> bool:
    """Whether a choice is within the budget and every expert's share."""
    spent = np.bincount(c.expert[choice], c.nbytes[choice], len(constraints.caps))
    return bool(spent.sum() <= constraints.budget_bytes and (spent <= constraints.caps).all())


def refuse_without_base(c: Candidates, needed: int, budget_bytes: int) -> None:
    """Raise BudgetError where there is a candidate that nothing could stand in for."""
    if any(r.block_l2sq is None for r in c.rows):
        raise lacks_base(needed, budget_bytes)


def refuse_dear_pins(c: Candidates, constraints: Constraints) -> None:
    """Raise BudgetError where the blocks that are pinned cost more than there is."""
    refuse_dear(int(c.nbytes[constraints.pinned & ~c.zero].sum()), constraints)


def refuse_dear(needed: int, constraints: Constraints) -> None:
    """Raise BudgetError where what is pinned, `needed` bytes, costs more than there is."""
    if needed > constraints.budget_bytes:
        raise BudgetError(
            "The budget does not cover what the recipe pins",
            where="budget, pin",
            expected=f"at least {needed} bytes",
            found=f"{constraints.budget_bytes} bytes",
            next_step="raise the budget, or pin less",
        )


def magnitude(c: Candidates, free: Choice) -> Ranked:
    """By ‖c·δ‖² per byte: what is best for deltas that are orthogonal to each other."""
    items = single_items(c, _units(c, free))
    return items, _by_worth(c, items)


def conflict_aware(c: Candidates, free: Choice) -> Ranked:
    """By what an item saves of the error per byte, given what it agrees and conflicts with.

    For sums of deltas, from their inner products; for other merges, as simulated on samples of the
    deltas. Output blocks are independent, so reading the steepest parts of their convex hulls first
    is optimal for every budget that they fill exactly (Everett 1963, Lagrange multipliers).
    Rows that are read whole are ranked by magnitude among the others.
    """
    chains = chain_items(c, free & ~c.is_bundled)
    items = joined([chains, single_items(c, _units(c, free & c.is_bundled))])
    return items, _by_worth(c, items)


def _units(c: Candidates, free: Choice) -> I64Array:
    """The units with something to read in `free`, ascending."""
    of_candidate = c.unit[free & ~c.zero]
    units: I64Array = of_candidate[np.diff(of_candidate, prepend=-1) > 0]
    return units


def _by_worth(c: Candidates, items: Items) -> I64Array:
    """Most saved per byte first; of equals, the first in the list."""
    from mergepipe_pipeline.planner.chains import falling

    cost = _summed(items, c.nbytes[items.members])
    worth = falling(items.saved / np.maximum(cost, 1), items.chain)
    return np.argsort(-worth, kind="stable")


def _summed(items: Items, values: I64Array) -> I64Array:
    """Per item, the sum over its members."""
    if not len(items.saved):
        return np.zeros(0, np.int64)
    sums: I64Array = np.add.reduceat(values, items.first[:-1])
    return sums


STRATEGIES: dict[str, Strategy] = {
    "magnitude": magnitude,
    "conflict_aware": conflict_aware,
}
