"""Asks the optimiser for points, and says what is to be done of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.errors import SearchError
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.search.bayes import Proposer
from mergepipe_pipeline.search.ledger import Ledger, Prior, Proposal, Result, Search
from mergepipe_pipeline.search.pareto import Trials, diagonal
from mergepipe_pipeline.search.prior import search_prior
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class SearchState:
    """Where a search is: how many results, failures and proposals, and which are pending.

    Of pending ones somebody evaluates those `running`, nobody those `waiting`; `left` are not
    proposed yet. `ended` says why no more is to be done, "" while there is.
    """

    evaluations: int
    done: int
    failed: int
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    left: int
    ended: str

    @property
    def summary(self) -> str:
        """All of it in one sentence."""
        return (
            f"{self.done} of {self.evaluations} evaluated, {self.failed} of them failed; "
            f"{len(self.running)} running, {len(self.waiting)} waiting"
        )


def state_of(warehouse: Warehouse, search: Search) -> SearchState:
    """Where a search is. Raises CorruptionError for a damaged fact."""
    ledger, file = Ledger(warehouse, search.name), search.file
    results = ledger.results()
    pending = sorted(ledger.proposals().keys() - results.keys())
    running = [n for n in pending if ledger.is_claimed(n)]
    left = max(0, file.evaluations - len(results) - len(pending))
    return SearchState(
        file.evaluations,
        len(results),
        sum(r.is_failure for r in results.values()),
        tuple(running),
        tuple(n for n in pending if n not in running),
        left,
        _ended(search, ledger, results, is_all=not left and not pending),
    )


def _ended(search: Search, ledger: Ledger, results: dict[int, Result], *, is_all: bool) -> str:
    latest = sorted(results.values(), key=lambda r: r.ended, reverse=True)
    in_a_row = list(takewhile(lambda r: r.is_failure, latest))
    if len(in_a_row) >= search.file.failures or (is_all and len(in_a_row) == len(latest)):
        return (
            f"the last {len(in_a_row)} evaluations failed, the last one so: {in_a_row[0].failure}; "
            f"remove their files in {ledger.folder / 'results'} to have them again"
        )
    return f"all {len(results)} evaluations are done" if is_all else ""


def propose(
    warehouse: Warehouse, search: Search, count: int, progress: Progress | None = None
) -> list[int]:
    """Write down up to `count` new points, as the results and pending proposals suggest; their
    numbers.

    Fewer, or none, where the search has all its evaluations.
    Raises SearchError where nothing is pending and the grid has no other point.
    """
    prior = search_prior(warehouse, search, progress)
    ledger = Ledger(warehouse, search.name)
    with ledger.turn():
        proposals, results = ledger.proposals(), ledger.results()
        count = min(count, search.file.evaluations - len(proposals))
        if count <= 0:
            return []
        points = _points(search, prior, proposals, results, count)
        if not len(points) and proposals.keys() <= results.keys():
            raise _used_up(search, len(results))
        first = max(proposals, default=0) + 1
        for number, point in enumerate(points, first):
            ledger.put_proposal(number, tuple(float(x) for x in point))
        return list(range(first, first + len(points)))


def _points(
    search: Search,
    prior: Prior,
    proposals: dict[int, Proposal],
    results: dict[int, Result],
    count: int,
) -> F64Array:
    file = search.file
    dims, objectives = len(prior.labels), len(file.objectives)
    # One weight for all layers, which layers that fit each other often need.
    begin = diagonal(dims, file.initial // 2)
    asked = Proposer(dims, file.seed, file.initial, np.array(prior.length_scales), begin)
    tried, pending = sorted(results), sorted(proposals.keys() - results.keys())
    trials = Trials(
        _table([results[n].point for n in tried], dims),
        _table([results[n].values for n in tried], objectives),
    )
    return asked.propose(trials, _table([proposals[n].point for n in pending], dims), count)


def _used_up(search: Search, tried: int) -> SearchError:
    return SearchError(
        "The space of a search is used up",
        where=search.name,
        expected=f"a point for each of {search.file.evaluations} evaluations",
        found=f"{tried} points, and no other on the grid",
        next_step="begin a search with more blocks, or be content with its front",
    )


def _table(rows: Sequence[Sequence[float]], width: int) -> F64Array:
    return np.array(rows, np.float64).reshape(len(rows), width)
