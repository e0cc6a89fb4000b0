"""The candidates of a search: each is merged through the action cache, then measured.

It is kept as a stage of nobody's result, so that `gc` removes it unless it is on the front.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import isfinite

from mergepipe_pipeline.domain.evaluation import Metrics
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import UNMERGEABLE, EvaluationError, NotFoundError
from mergepipe_pipeline.execution.plan_leases import lease
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.quality.measure import evaluate as measured
from mergepipe_pipeline.search.ledger import Ledger, MergeCost, Proposal, Result, Search, now
from mergepipe_pipeline.search.pareto import REFERENCE
from mergepipe_pipeline.search.prior import search_prior
from mergepipe_pipeline.search.space import Space
from mergepipe_pipeline.search.start import parsed_of, refuse_changed, refuse_other_evaluator
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged candidate and what that took."""

    proposal: Proposal
    snapshot: Snapshot
    cost: MergeCost


def evaluate(
    warehouse: Warehouse, search: Search, number: int, *, options: EngineOptions | None = None
) -> Result:
    """Merge and measure a proposal, and remember the result; one that is there is given.

    A candidate that cannot be merged or measured has a result, too: a failure. Raises as
    `Candidates.begin` and `Candidates.measure`.
    """
    candidates = Candidates(warehouse, search, options)
    with ExitStack() as held:
        merged = candidates.begin(number, held)
        if isinstance(merged, Result):
            return merged
        return candidates.ledger.put_result(candidates.measure(merged))


@dataclass(frozen=True)
class Candidates:
    """Merges, measures and gives the candidates of a search."""

    warehouse: Warehouse
    search: Search
    options: EngineOptions | None = None
    progress: Progress | None = None

    @property
    def ledger(self) -> Ledger:
        """The facts of the search."""
        return Ledger(self.warehouse, self.search.name)

    def begin(self, number: int, held: ExitStack) -> Merged | Result:
        """Claim and merge a proposal until `held` is closed; its result, if it has or gives one.

        Raises BusyError where somebody else evaluates it, NotFoundError for a number that nobody
        proposed, what `refuse_changed` raises, and what merging raises for reasons that are not the
        candidate's, as StorageFullError.
        """
        proposal = self.ledger.proposal(number)
        held.enter_context(self.ledger.claim(number))
        known = self.ledger.result(number)
        if known is not None:
            return known
        merged = self.merge(proposal, held)
        return self.ledger.put_result(merged) if isinstance(merged, Result) else merged

    def merge(self, proposal: Proposal, leases: ExitStack) -> Merged | Result:
        """Merge a point, leased until `leases` is closed; a failure if it gives no merge."""
        warehouse, search, progress = self.warehouse, self.search, self.progress
        refuse_changed(warehouse, search, progress)
        began_s = time.monotonic()
        try:
            space = Space(search.file, search.layers, search_prior(warehouse, search).blocks)
            title = f"candidate {proposal.number} of the search {search.name}"
            text = space.recipe(title, proposal.point)
            parsed = parsed_of(search, text, f"{search.name}.{proposal.number:04d}")
            plan = plan_in_stages(warehouse, parsed, progress=progress, relative_to=search.folder)
            leases.enter_context(lease(warehouse, plan))
            done = run_plan(warehouse, plan, options=self.options, progress=progress, is_stage=True)
        except UNMERGEABLE as error:
            return self._failure(proposal, str(error))
        cost = MergeCost(
            done.realised.layers_executed,
            done.realised.layers_reused,
            done.realised.expert_bytes_read + done.realised.base_bytes_read,
            plan.read_nbytes,
            round(time.monotonic() - began_s, 3),
        )
        return Merged(proposal, done.snapshot, cost)

    def measure(self, merged: Merged, stop: int | None = None) -> Result:
        """Return what the evaluator says of a merged candidate; nothing is remembered.

        Raises AbandonedError as soon as the descriptor `stop` can be read, and EvaluationError
        where the evaluator changed while the candidate was merged: that is no failure of the
        candidate's.
        """
        search, proposal, snapshot = self.search, merged.proposal, merged.snapshot
        refuse_other_evaluator(search)
        metrics: Metrics = {}
        try:
            evaluation = measured(
                self.warehouse, snapshot, search.file.evaluator, search.folder, stop=stop
            )
            metrics = evaluation.metrics
            values = search.file.values(metrics)
        except EvaluationError as error:
            return self._failure(proposal, str(error), merged)
        except KeyError as error:
            there = ", ".join(metrics)
            why = f"the evaluator does not print the metric {error}; it prints {there}"
            return self._failure(proposal, why, merged)
        if not all(map(isfinite, values)):
            why = "a metric lies too far from its anchors for a number: bring them nearer to it"
            return self._failure(proposal, why, merged)
        return Result(
            proposal.number,
            proposal.point,
            values,
            dict(metrics),
            "",
            snapshot.snapshot_id,
            merged.cost,
            evaluation.seconds,
            now(),
        )

    def _failure(self, proposal: Proposal, why: str, merged: Merged | None = None) -> Result:
        values = (REFERENCE,) * len(self.search.file.objectives)
        snapshot_id, cost = (merged.snapshot.snapshot_id, merged.cost) if merged else (None, None)
        number, point = proposal.number, proposal.point
        return Result(number, point, values, {}, why, snapshot_id, cost, 0.0, now())

    def snapshot(self, number: int, leases: ExitStack) -> Snapshot:
        """The snapshot of an evaluated candidate, leased until `leases` is closed.

        One that was collected is merged again. Raises EvaluationError for one that gives no merge,
        or another one than was measured.
        """
        warehouse, ledger = self.warehouse, self.ledger
        result, where = ledger.result(number), f"candidate {number} of the search {ledger.name}"
        if result is not None and result.snapshot_id is not None:
            need = Need(snapshot_ids=frozenset([result.snapshot_id]))
            leases.enter_context(warehouse.leases.hold(need, "publish"))
            with suppress(NotFoundError):
                return load_snapshot(warehouse.snapshots, result.snapshot_id)
        merged = self.merge(ledger.proposal(number), leases)
        if isinstance(merged, Result):
            raise EvaluationError(
                "A candidate cannot be merged",
                where=where,
                found=merged.failure,
                next_step="take another one",
            )
        if result is not None and merged.snapshot.snapshot_id != result.snapshot_id:
            raise EvaluationError(
                "A candidate is not merged to what was measured",
                where=where,
                expected=f"snapshot {result.snapshot_id}",
                found=f"{merged.snapshot.snapshot_id}: its plan reads other bytes by now, as it "
                "does where an expert was packed meanwhile",
                next_step=f"remove {ledger.folder / 'results' / f'{number:04d}.json'} and run the "
                "search again to have it measured anew, or take another candidate",
            )
        return merged.snapshot
