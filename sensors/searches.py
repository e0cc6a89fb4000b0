"""Watches searches: what each ledger says that is to be done, against what runs do already."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.assets.searches import SEARCH_TAG, candidates, pool
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.ticks import (
    ACTIVE,
    LOADING,
    SOON_S,
    Ours,
    asked,
    limit_pool,
    request_or_reason_to_wait,
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
    jobs: Mapping[str, Mapping[str, Any]], identity: str, place: Place = ALONE
) -> dg.SensorDefinition:
    """The level-triggered sensor over all search files; `jobs` by search and step.

    `identity` is that of the warehouse for which the assets of the searches were built.
    """

    @standing_sensor(
        "Goes on with every search: begins it, has as many candidates evaluated at once as it has "
        "workers, and has its front drawn and published; its ticks say where each is.",
        SOON_S,
        [job for steps in jobs.values() for job in steps.values()],
        place,
    )
    def search_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
        """Requests what searches ask for and no run does yet."""
        warehouse, states = mergepipe.warehouse, list[str]()
        requests, partitions = list[dg.RunRequest](), list[dg.AddDynamicPartitionsRequest]()
        ours, known = Ours.of(context, mergepipe, place), jobs if place.is_known(context) else {}
        for standing in standing_searches(warehouse, recipe_files(warehouse)):
            if place.is_guest and standing.name not in jobs:
                continue
            look = _Look(ours, identity, standing, known.get(standing.name, {}), mergepipe.retry_s)
            said = standing.problem or ("" if look.jobs else LOADING)
            try:
                said = said or look.at(due_of(warehouse, standing))
            except Exception as error:  # it is this search's alone
                said = str(error)
            requests += look.requests
            partitions += look.partitions
            states.append(visible(f"{standing.name}: {said}"))
        more = {"dynamic_partitions_requests": partitions} if requests else {}
        return asked(context, requests, states, separated(states) or "no searches", **more)

    return search_sensor


@dataclass
class _Look:
    """One look at one search: what it gives to request."""

    ours: Ours
    identity: str
    standing: StandingSearch
    jobs: Mapping[str, Any]
    retry_s: float
    requests: list[dg.RunRequest] = field(default_factory=list)
    partitions: list[dg.AddDynamicPartitionsRequest] = field(default_factory=list)

    def at(self, due: SearchDue) -> str:
        """Request what is due; says where the search is and what waits, why."""
        places = pool(self.standing, self.identity)
        limit_pool(self.ours.instance, places, self.standing.workers)
        runs = self.ours.runs(ACTIVE, {SEARCH_TAG: self.standing.name})
        doing = [run.tags.get(STEP_TAG, "") for run in runs]
        waits = [*self._evaluate(due, doing)]
        if not doing and not self.requests:
            waits += [*self._begin_or_show(due)]
        return "; ".join([due.status, *waits])

    def _evaluate(self, due: SearchDue, doing: list[str]) -> Iterator[str]:
        """Candidates that nobody evaluates, as long as there are free workers."""
        partitions = candidates(self.standing, self.identity)
        known = set(self.ours.instance.get_dynamic_partitions(partitions.name or ""))
        missing = [key for n in due.known if (key := f"{n:04d}") not in known]
        if missing:
            self.partitions.append(partitions.build_add_request(missing))
        free = self.standing.workers - sum(step.startswith("evaluate") for step in doing)
        for number in due.waiting:
            if len(self.requests) < free and f"evaluate {number:04d}" not in doing:
                yield from self._ask("evaluate", f"{number:04d}", partition=f"{number:04d}")

    def _begin_or_show(self, due: SearchDue) -> Iterator[str]:
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
        tags = {SEARCH_TAG: self.standing.name, STEP_TAG: f"{step} {about}"}
        key, name = self.ours.place.key, self.standing.name
        keys = None if assets is None else [key(name, asset) for asset in assets]
        made = request_or_reason_to_wait(
            self.ours,
            f"{self.standing.name}:{step}:{about}",
            tags,
            self.retry_s,
            job_name=self.jobs[step].name,
            partition_key=partition,
            asset_selection=keys,
        )
        if isinstance(made, str):
            yield f"{step} {about}: {made}"
        else:
            self.requests.append(made)

    def _shown(self, asset: str) -> str | None:
        """The results of which an asset was made last."""
        key = self.ours.place.key(self.standing.name, asset)
        event = self.ours.instance.get_latest_materialization_event(key)
        made = event.asset_materialization if event else None
        return ((made.tags or {}) if made else {}).get("dagster/data_version")
