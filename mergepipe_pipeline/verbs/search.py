"""The verbs of a search: begin it, propose, evaluate, and publish what lies along its front.

Each does one step from what the ledger says, so that any process may do any step at any time. A
search that has ended is published as `<search>.1`, `<search>.2` and so on along its front. What
Dagster starts for the search files of a warehouse is read from files and ledger at each look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe_pipeline.deploy.recipe_files import (
    RecipeFile,
    StandingFile,
    named_files,
    not_registered,
)
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.snapshot import Ref
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.references import parse_reference
from mergepipe_pipeline.recipe.yaml_text import MAX_NBYTES
from mergepipe_pipeline.resolution.origins import folder_of
from mergepipe_pipeline.search.candidate import Candidates, evaluate
from mergepipe_pipeline.search.front import Bound, Front, cheapest, front, front_picture, ref_name
from mergepipe_pipeline.search.ledger import Ledger, Prior, Result, Search, searches
from mergepipe_pipeline.search.loop import SearchState, propose, run_search, state_of
from mergepipe_pipeline.search.prior import search_prior
from mergepipe_pipeline.search.search_file import SearchFile, parse_search
from mergepipe_pipeline.search.start import (
    SearchCost,
    begin_search,
    read_search,
    search_cost,
    start_search,
)
from mergepipe_pipeline.storage.regular import read_small
from mergepipe_pipeline.text import escaped
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.warehouse import Warehouse

__all__ = [
    "Bound",
    "Front",
    "Prior",
    "Result",
    "Search",
    "SearchCost",
    "SearchState",
    "begin_search",
    "front",
    "front_picture",
    "read_search",
    "run_search",
    "search_cost",
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
    bounds: Sequence[Bound],
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
    chosen = cheapest(front(warehouse, search), bounds, cost)
    return _publish(warehouse, search, chosen.number, ref or search.name, progress)


def _publish(
    warehouse: Warehouse, search: Search, number: int, ref: str, progress: Progress | None
) -> Ref:
    with ExitStack() as leases:
        snapshot = Candidates(warehouse, search, progress=progress).snapshot(number, leases)
        reason = f"candidate {number} of the search {search.name}"
        return publish(warehouse, snapshot.snapshot_id, ref, reason=reason, progress=progress)


@dataclass(frozen=True)
class StandingSearch(StandingFile):
    """A search file of the warehouse; its inputs are base and sources."""

    kind = "search"

    path: Path = Path()
    file: SearchFile | None = None

    @property
    def workers(self) -> int:
        """How many candidates are evaluated at once."""
        return 1 if self.file is None else self.file.workers

    @property
    def token(self) -> str:
        """Changes when definitions made from this search would change."""
        return digest_json([self.name, self.members, self.workers, self.problem])[:16]


@dataclass(frozen=True, slots=True)
class SearchDue:
    """The work that a standing search asks for at present.

    `begins`: that its prior is made and candidates are proposed, as none is pending. `waiting` are
    candidates that nobody evaluates, `known` all that are proposed. `results` changes with every
    result, "" while there is none; `has_all` of them. `status` says where the search is.
    """

    begins: bool
    waiting: tuple[int, ...]
    known: tuple[int, ...]
    results: str
    has_all: bool
    status: str


def standing_searches(
    warehouse: Warehouse, recipes: tuple[RecipeFile, ...]
) -> tuple[StandingSearch, ...]:
    """Every search file of the warehouse, usable or not, in name order.

    One that has the name of a recipe cannot be used: assets and refs of both would be alike.
    """
    taken = {r.identifier: f"the recipe {r.name}" for r in recipes}
    searches_read = []
    for path, problem in named_files(warehouse.searches, taken):
        name = escaped(path.stem if problem is None else path.name)
        standing = StandingSearch(name, problem=problem and escaped(problem), path=path)
        searches_read.append(standing if problem else _read(warehouse, standing))
    return tuple(searches_read)


def due_of(warehouse: Warehouse, standing: StandingSearch) -> SearchDue:
    """The work that a usable search asks for.

    Raises RecipeError for a file that is not what it began with, CorruptionError.
    """
    if standing.name not in searches(warehouse):
        return SearchDue(True, (), (), "", False, "it is to begin")
    ledger = Ledger(warehouse, standing.name)
    search = ledger.search()
    if (search.file, search.folder) != (standing.file, folder_of(standing.path)):
        raise RecipeError(
            "A search asks for something else than it began with",
            where=str(standing.path),
            expected=f"what {ledger.folder / 'search.json'} holds",
            found="another file, or another folder",
            next_step="bring the file back, or give the new one another name",
        )
    state = state_of(warehouse, search)
    return SearchDue(
        begins=not state.ended and not state.running and not state.waiting,
        waiting=() if state.ended else state.waiting,
        known=tuple(sorted(ledger.proposals())),
        results=results_token(warehouse, standing),
        has_all=state.done >= state.evaluations,
        status=f"{state.summary}; {state.ended}" if state.ended else state.summary,
    )


def begin(warehouse: Warehouse, standing: StandingSearch) -> tuple[SearchCost, Prior, list[int]]:
    """Begin a search or go on with it: its worst cost, its prior, and what it proposes now.

    Raises what `start_search`, `search_prior` and `propose` raise.
    """
    search = start_search(warehouse, standing.path)
    cost, prior = search_cost(warehouse, search), search_prior(warehouse, search)
    return cost, prior, _fill(warehouse, search)


def evaluate_candidate(
    warehouse: Warehouse, standing: StandingSearch, number: int, options: EngineOptions
) -> tuple[Result, SearchState]:
    """Evaluate a candidate and propose what takes its place; its result and where the search is.

    Raises what `evaluate` and `propose` raise.
    """
    search = Ledger(warehouse, standing.name).search()
    result = evaluate(warehouse, search, number, options=options)
    _fill(warehouse, search)
    return result, state_of(warehouse, search)


def results_token(warehouse: Warehouse, standing: StandingSearch) -> str:
    """A token that changes with every result of a search; "" while there is none."""
    results = Ledger(warehouse, standing.name).results()
    return digest_json([[n, r.ended] for n, r in sorted(results.items())])[:16] if results else ""


def _fill(warehouse: Warehouse, search: Search) -> list[int]:
    """Propose a candidate for each worker that would have none."""
    state = state_of(warehouse, search)
    free = search.file.workers - len(state.running) - len(state.waiting)
    return [] if state.ended or free <= 0 else propose(warehouse, search, free)


def _read(warehouse: Warehouse, standing: StandingSearch) -> StandingSearch:
    """A search file, as its text and the names of the catalog give it."""
    try:
        text = read_small(standing.path, MAX_NBYTES).decode()
        file = parse_search(text, str(standing.path))
        members = tuple(dict.fromkeys(_members(file)))
        missing = [name for name in members if name not in warehouse.catalog]
    except Exception as error:  # whatever it is, it is this search's alone
        return replace(standing, problem=escaped(str(error)))
    problem = not_registered(missing) if missing else None
    return replace(standing, file=file, members=members, problem=problem)


def _members(file: SearchFile) -> Iterator[str]:
    for text in (file.base_model, *file.sources):
        ref = parse_reference(text)
        yield ref.model
        if ref.lora is not None:
            yield ref.lora
