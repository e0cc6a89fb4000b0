"""Watches searches: what each ledger says that is to be done, against what runs do already."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dagster as dg

from mergepipe_pipeline.assets.searches import SEARCH_TAG, candidates, pool
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.runs import ACTIVE, Ours, request_or_reason_to_wait
from mergepipe_pipeline.sensors.ticks import (
    LOADING,
    SOON_S,
    asked,
    limit_pool,
    separated,
    standing_sensor,
)
from mergepipe_pipeline.text import visible
from mergepipe_pipeline.verbs.search import (
    SearchDue,
    StandingSearch,
    due_of,
    standing_searches,
)

#: What a run of a search does: the step, and the candidate or the results that it is about.
STEP_TAG = "mergepipe/search_step"


def build_search_sensor(
    jobs: Mapping[str, Mapping[str, Any]], identity: str, is_known: Callable[[], bool]
) -> dg.SensorDefinition:
    """The level-triggered sensor over all search files; `jobs` by search and step.

    `identity` is that of the warehouse for which the assets of the searches were built; `is_known`
    says whether the daemon knows the jobs.
    """

    @standing_sensor(
        "Goes on with every search: begins it, has as many candidates evaluated at once as it has "
        "workers, and has its front drawn and published; its ticks say where each is.",
        SOON_S,
        [job for steps in jobs.values() for job in steps.values()],
    )
    def search_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
        """Requests what searches ask for and no run does yet."""
        warehouse, states = mergepipe.warehouse, list[str]()
        requests, partitions = list[dg.RunRequest](), list[dg.AddDynamicPartitionsRequest]()
        ours, known = Ours.of(context, mergepipe), jobs if is_known() else {}
        for standing in standing_searches(warehouse, recipe_files(warehouse)):
            look = _Look(ours, identity, standing, known.get(standing.name), mergepipe.retry_s)
            try:
                problem = look.problem
                said = problem or look.at(due_of(warehouse, standing))
            except Exception as error:  # it is this search's alone
                said = str(error)
            requests += look.requests
            partitions += look.partitions
            states.append(visible(f"{standing.name}: {said}"))
        more = {"dynamic_partitions_requests": partitions} if requests else {}
        return asked(context, requests, states, separated(states) or "no searches", **more)

    return search_sensor


class _Look:
    """One look at one search: what it gives to request."""

    def __init__(
        self,
        ours: Ours,
        identity: str,
        standing: StandingSearch,
        jobs: Mapping[str, Any] | None,
        retry_s: float,
    ) -> None:
        self._instance, self._ours, self._read = ours.instance, ours, standing
        self._jobs, self._retry_s = jobs, retry_s
        self._pool, self._candidates = pool(standing, identity), candidates(standing, identity)
        self.requests: list[dg.RunRequest] = []
        self.partitions: list[dg.AddDynamicPartitionsRequest] = []

    @property
    def problem(self) -> str | None:
        """Why nothing can be asked for."""
        return self._read.problem or (None if self._jobs else LOADING)

    def at(self, due: SearchDue) -> str:
        """Request what is due; says where the search is and what waits, why."""
        limit_pool(self._instance, self._pool, self._read.workers)
        runs = self._ours.runs(ACTIVE, {SEARCH_TAG: self._read.name})
        doing = [run.tags.get(STEP_TAG, "") for run in runs]
        waits = [*self._evaluate(due, doing)]
        if not doing and not self.requests:
            waits += [*self._begin_or_show(due)]
        return "; ".join([due.status, *waits])

    def _evaluate(self, due: SearchDue, doing: list[str]) -> Iterator[str]:
        """Candidates that nobody evaluates, as long as there are free workers."""
        known = set(self._instance.get_dynamic_partitions(self._candidates.name or ""))
        missing = [key for n in due.known if (key := f"{n:04d}") not in known]
        if missing:
            self.partitions.append(self._candidates.build_add_request(missing))
        free = self._read.workers - sum(step.startswith("evaluate") for step in doing)
        for number in due.waiting:
            if len(self.requests) < free and f"evaluate {number:04d}" not in doing:
                yield from self._ask("evaluate", f"{number:04d}", partition=f"{number:04d}")

    def _begin_or_show(self, due: SearchDue) -> Iterator[str]:
        """What is asked for while no run works on the search."""
        if due.begins:
            yield from self._ask("begin", str(len(due.known)))
        elif due.results and self._shown("front") != due.results:
            yield from self._ask("show", due.results, assets=["front"])
        elif due.results and due.has_all and self._shown("refs") != due.results:
            yield from self._ask("show", f"refs {due.results}", assets=["refs"])

    def _ask(
        self,
        step: str,
        about: str,
        *,
        partition: str | None = None,
        assets: list[str] | None = None,
    ) -> Iterator[str]:
        """Request a run unless attempts at the same have failed lately; why not, if so."""
        assert self._jobs is not None
        tags = {SEARCH_TAG: self._read.name, STEP_TAG: f"{step} {about}"}
        keys = None if assets is None else [dg.AssetKey([self._read.name, a]) for a in assets]
        made = request_or_reason_to_wait(
            self._ours,
            f"{self._read.name}:{step}:{about}",
            tags,
            self._retry_s,
            job_name=self._jobs[step].name,
            partition_key=partition,
            asset_selection=keys,
        )
        if isinstance(made, str):
            yield f"{step} {about}: {made}"
        else:
            self.requests.append(made)

    def _shown(self, asset: str) -> str | None:
        """The results of which an asset was made last."""
        key = dg.AssetKey([self._read.name, asset])
        event = self._instance.get_latest_materialization_event(key)
        made = event.asset_materialization if event else None
        return ((made.tags or {}) if made else {}).get("dagster/data_version")
