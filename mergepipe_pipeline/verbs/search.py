"""The verbs of a search: begin it, propose, evaluate, and publish what lies along its front.

Each does one step from what the ledger says, so that any process may do any step at any time. A
search that has ended is published as `<search>.1`, `<search>.2` and so on along its front.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from mergepipe_pipeline.domain.snapshot import Ref
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.search.candidate import evaluate, snapshot_of
from mergepipe_pipeline.search.front import Front, cheapest, front, front_picture, ref_name
from mergepipe_pipeline.search.ledger import Ledger, Prior, Proposal, Result, Search, searches
from mergepipe_pipeline.search.loop import SearchState, Tell, propose, run_search, state_of
from mergepipe_pipeline.search.prior import search_prior
from mergepipe_pipeline.search.start import (
    SearchCost,
    begin_search,
    read_search,
    search_cost,
    start_search,
)
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.warehouse import Warehouse

__all__ = [
    "Front",
    "Prior",
    "Proposal",
    "Result",
    "Search",
    "SearchCost",
    "SearchState",
    "Tell",
    "begin_search",
    "evaluate",
    "front",
    "front_picture",
    "pick",
    "propose",
    "publish_front",
    "read_search",
    "run_search",
    "search_cost",
    "search_of",
    "search_prior",
    "searches",
    "start_search",
    "state_of",
]


def search_of(warehouse: Warehouse, name: str) -> Search:
    """A search that has begun, by its name. Raises NotFoundError, CorruptionError."""
    return Ledger(warehouse, name).search()


def publish_front(
    warehouse: Warehouse, search: Search, progress: Progress | None = None
) -> list[Ref]:
    """Publish what lies on the front, the best of the first objective as `<search>.1`.

    For a search that has ended: refs beyond the end of a front that became shorter stay. What was
    collected is merged again. Raises what `publish` raises.
    """
    refs = []
    for k, number in enumerate(front(warehouse, search).numbers, 1):
        refs.append(_publish(warehouse, search, number, ref_name(search, k), progress))
    return refs


def pick(
    warehouse: Warehouse,
    search: Search,
    minima: Mapping[str, float],
    maxima: Mapping[str, float] | None = None,
    *,
    cost: str | None = None,
    ref: str | None = None,
    progress: Progress | None = None,
) -> Ref:
    """Publish the cheapest candidate that keeps to bounds on its metrics, by default under the
    search's name.

    `cost` is the objective that says cheap, the last one by default. Raises SearchError where no
    candidate keeps to the bounds, with the best that there is.
    """
    chosen = cheapest(front(warehouse, search), minima, maxima or {}, cost)
    return _publish(warehouse, search, chosen.number, ref or search.name, progress)


def _publish(
    warehouse: Warehouse, search: Search, number: int, ref: str, progress: Progress | None
) -> Ref:
    with ExitStack() as leases:
        snapshot = snapshot_of(warehouse, search, number, leases, progress)
        reason = f"candidate {number} of the search {search.name}"
        return publish(warehouse, snapshot.snapshot_id, ref, reason=reason, progress=progress)
