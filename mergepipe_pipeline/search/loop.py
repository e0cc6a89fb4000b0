"""The loop of a search: several evaluations at once, each a child process beside this one.

Points are proposed and merged one after the other by who runs the loop; evaluators run meanwhile.
Nothing but the ledger remembers what is to be done, so that a loop that was killed goes on, and
several processes may work on one search.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial

from mergepipe_pipeline.errors import BusyError, SearchError
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.quality.child import AbandonedError
from mergepipe_pipeline.search.candidate import measure, merge_candidate, proposal_of
from mergepipe_pipeline.search.ledger import Ledger, Result, Search
from mergepipe_pipeline.search.proposing import SearchState, propose, state_of
from mergepipe_pipeline.warehouse import Warehouse

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
        self._ledger = Ledger(warehouse, search.name)
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
                held.enter_context(self._ledger.claim(number))
            except BusyError:
                return False
            if self._ledger.result(number) is not None:
                return True
            proposal = proposal_of(self._ledger, number)
            merged = merge_candidate(
                self._warehouse, self._search, proposal, held, progress=self._progress
            )
            if isinstance(merged, Result):
                self._keep(merged)
                return True
            task = partial(measure, self._warehouse, self._search, proposal, merged, self._stop[0])
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
        kept = self._ledger.put_result(result)
        self._tell(kept, state_of(self._warehouse, self._search))

    def _give_back(self) -> None:
        """Keep what was measured meanwhile, and leave the rest to who goes on."""
        for future, held in self._running.items():
            with held:
                error = future.exception()
                if error is None:
                    self._ledger.put_result(future.result())
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
