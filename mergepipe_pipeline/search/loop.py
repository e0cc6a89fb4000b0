"""The loop of a search: several evaluations at once, each a child process beside this one.

Points are proposed and merged one after the other by who runs the loop; evaluators run meanwhile.
Nothing but the ledger remembers what is to be done, so that a loop that was killed goes on, and
several processes may work on one search.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.errors import BusyError, SearchError
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.quality.child import AbandonedError
from mergepipe_pipeline.search.bayes import Proposer
from mergepipe_pipeline.search.candidate import Candidates
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


#: Hears of each result, and where the search is.
Tell = Callable[[Result, SearchState], None]
#: Seconds between two looks at what other processes do.
_LOOK_S = 1.0


def run_search(
    warehouse: Warehouse,
    search: Search,
    *,
    progress: Progress | None = None,
    tell: Tell = lambda result, state: None,
) -> SearchState:
    """Evaluate what is pending and propose more, until the search has ended.

    Raises SearchError where too many evaluations in a row failed, or all, and what `evaluate`
    raises.
    """
    with _Loop(warehouse, search, progress, tell) as loop:
        state = loop.run()
    if state.done < state.evaluations:
        few = f"fewer than {search.file.failures} failures one after the other"
        raise _failed("A search ends early", search, state, few)
    if state.failed == state.done:
        one = "an evaluation that does not fail"
        raise _failed("A search ends without a front", search, state, one)
    return state


def _failed(what: str, search: Search, state: SearchState, expected: str) -> SearchError:
    return SearchError(
        what,
        where=f"{search.name}, {state.summary}",
        expected=expected,
        found=state.ended,
        next_step="if what failed was around the evaluator, remove these files and run it again: "
        "it goes on; with another evaluator or space it is another search, of another name",
    )


class _Loop:
    """Evaluations under way; leaving it kills their processes and gives their claims back."""

    def __init__(
        self,
        warehouse: Warehouse,
        search: Search,
        progress: Progress | None,
        tell: Tell,
    ) -> None:
        self._warehouse, self._search = warehouse, search
        self._progress, self._tell = progress, tell
        self._candidates = Candidates(warehouse, search, progress=progress)
        self._running: dict[Future[Result], ExitStack] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Loop:
        self._stack.callback(self._give_back)
        self._stop = self._stack.enter_context(_stop())
        # Entered last: its threads end once the pipe is closed, before claims are given back.
        self._pool = ThreadPoolExecutor(self._search.file.workers)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._stop[1])
        self._pool.shutdown()
        self._stack.close()

    def run(self) -> SearchState:
        """Go on until the search has ended."""
        while True:
            state = state_of(self._warehouse, self._search)
            is_over = bool(state.ended)
            if is_over and not self._running:
                return state
            is_free = not is_over and len(self._running) < self._search.file.workers
            if not (is_free and self._begin_one(state)):
                self._wait()

    def _begin_one(self, state: SearchState) -> bool:
        """Begin what waits, or what is proposed for it; False where there is nothing to begin."""
        waiting = state.waiting
        if not waiting and state.left:  # as late as possible: more is known then
            waiting = tuple(propose(self._warehouse, self._search, 1, self._progress))
        return any(self._begin(number) for number in waiting[:1])

    def _begin(self, number: int) -> bool:
        """Claim and merge a proposal, and let its evaluator run; False if somebody else has it."""
        with ExitStack() as held:
            try:
                merged = self._candidates.begin(number, held)
            except BusyError:
                return False
            if isinstance(merged, Result):
                self._keep(merged)
                return True
            task = partial(self._candidates.measure, merged, self._stop[0])
            self._running[self._pool.submit(task)] = held.pop_all()
            return True

    def _wait(self) -> None:
        """Until an evaluation ends, or it is time to look at other processes."""
        if not self._running:
            time.sleep(_LOOK_S)
            return
        done, _ = wait(self._running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        for future in done:
            with self._running.pop(future):
                self._keep(future.result())

    def _keep(self, result: Result) -> None:
        kept = self._candidates.ledger.put_result(result)
        self._tell(kept, state_of(self._warehouse, self._search))

    def _give_back(self) -> None:
        """Keep what was measured meanwhile, and leave the rest to who goes on."""
        for future, held in self._running.items():
            with held:
                error = future.exception()
                if error is None:
                    self._candidates.ledger.put_result(future.result())
                elif not isinstance(error, AbandonedError):
                    raise error
        self._running.clear()


@contextmanager
def _stop() -> Iterator[tuple[int, int]]:
    """A pipe whose reading end can be read once its writing end is closed."""
    read, write = os.pipe()
    try:
        yield read, write
    finally:
        os.close(read)
