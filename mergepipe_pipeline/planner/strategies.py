"""How a budget is spent: one function per strategy, each from candidates to a boolean choice.

`full` and `magnitude` are for use; `hash` and `drop-experts` are the baselines to compare with: the
reference implementation's name hashing, and leaving whole experts out. Every strategy stays within
the budget, is deterministic, and never pays for a block whose delta is known to be zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.planner.candidates import Candidates

Choice = npt.NDArray[np.bool_]
Strategy = Callable[[Candidates, int], Choice]


def choose(candidates: Candidates, budget_bytes: int | None, strategy: str) -> Choice:
    """Which candidates to read: everything useful if it fits, else what the strategy picks.

    Raises BudgetError for an unknown strategy, for `full` under a budget that is too small, and for
    a partial budget without a base to stand in for what is not read.
    """
    if strategy not in STRATEGIES:
        raise BudgetError(
            "Unknown strategy",
            where="strategy",
            expected=", ".join(STRATEGIES),
            found=repr(strategy),
            next_step="use magnitude",
        )
    useful = ~candidates.zero
    needed = int(candidates.nbytes[useful].sum())
    if budget_bytes is None or needed <= budget_bytes:
        return useful
    if any(r.block_l2sq is None for r in candidates.rows):
        raise BudgetError(
            "A partial budget needs a base model that stands in for what is not read",
            where="budget",
            expected=f"a base_model, or at least {needed} bytes",
            found=f"{budget_bytes} bytes and no base_model",
            next_step="add base_model to the recipe, or drop the budget",
        )
    return STRATEGIES[strategy](candidates, budget_bytes)


def _take_in_order(
    candidates: Candidates, order: npt.NDArray[np.int64], budget_bytes: int
) -> Choice:
    """Buy units along `order` as long as they fit; one too big for the rest is passed over."""
    nbytes = candidates.unit_nbytes
    chosen = np.zeros(candidates.n_units, dtype=np.bool_)
    left = budget_bytes
    order = order[~candidates.unit_zero[order]]
    while len(order):
        order = order[nbytes[order] <= left]
        fits = int(np.searchsorted(np.cumsum(nbytes[order]), left, side="right"))
        chosen[order[:fits]] = True
        left -= int(nbytes[order[:fits]].sum())
        order = order[fits:]
    choice: Choice = chosen[candidates.unit] & ~candidates.zero
    return choice


def full(candidates: Candidates, budget_bytes: int) -> Choice:
    """Everything or nothing: refuses a budget that does not cover all useful blocks."""
    needed = int(candidates.nbytes[~candidates.zero].sum())
    raise BudgetError(
        "The budget does not cover a full merge",
        where="budget",
        expected=f"at least {needed} bytes",
        found=f"{budget_bytes} bytes",
        next_step="raise the budget, or use strategy magnitude",
    )


def magnitude(candidates: Candidates, budget_bytes: int) -> Choice:
    """Greedy by ‖c·δ‖² per byte: optimal for near-orthogonal deltas of equal block size."""
    worth = candidates.unit_gain / np.maximum(candidates.unit_nbytes, 1)
    return _take_in_order(candidates, np.argsort(-worth, kind="stable"), budget_bytes)


def by_hash(candidates: Candidates, budget_bytes: int) -> Choice:
    """Blocks in the order of a hash of their names: importance plays no part."""
    names = [r.name for r in candidates.rows]
    first = candidates.unit_first
    rows, blocks = candidates.row[first].tolist(), candidates.block[first].tolist()
    keys = np.array(
        [
            int.from_bytes(hashlib.sha256(f"{names[r]}:{b}".encode()).digest()[:8], "big")
            for r, b in zip(rows, blocks, strict=True)
        ],
        dtype=np.uint64,
    )
    return _take_in_order(candidates, np.argsort(keys, kind="stable"), budget_bytes)


def drop_experts(candidates: Candidates, budget_bytes: int) -> Choice:
    """Whole experts in recipe order, as many as fit."""
    positions = np.array([r.position for r in candidates.rows], dtype=np.int64)[candidates.row]
    chosen = np.zeros(len(positions), dtype=np.bool_)
    left = budget_bytes
    for position in sorted(set(positions.tolist())):
        mine = (positions == position) & ~candidates.zero
        cost = int(candidates.nbytes[mine].sum())
        if cost <= left:
            chosen |= mine
            left -= cost
    return chosen


STRATEGIES: dict[str, Strategy] = {
    "full": full,
    "magnitude": magnitude,
    "hash": by_hash,
    "drop-experts": drop_experts,
}
