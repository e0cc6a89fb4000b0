"""One candidate of a search: merged through the action cache, then measured.

It is kept as a stage of nobody's result, so that `gc` removes it unless it is on the front.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import isfinite

from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import UNMERGEABLE, EvaluationError, NotFoundError
from mergepipe_pipeline.execution.plan_leases import lease
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.quality.measure import evaluate as measured
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.search.ledger import Ledger, MergeCost, Proposal, Result, Search, now
from mergepipe_pipeline.search.prior import search_prior
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
    warehouse: Warehouse,
    search: Search,
    number: int,
    *,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
) -> Result:
    """Merge and measure a proposal, and remember the result; one that is there is given.

    A candidate that cannot be merged or measured has a result, too: a failure. Raises BusyError
    where somebody else evaluates it, NotFoundError for a number that nobody proposed, what
    `refuse_changed` raises, and what merging raises for reasons that are not the candidate's, as
    StorageFullError.
    """
    with ExitStack() as held:
        merged = begin(warehouse, search, number, held, options, progress)
        if isinstance(merged, Result):
            return merged
        return Ledger(warehouse, search.name).put_result(measure(warehouse, search, merged))


def begin(
    warehouse: Warehouse,
    search: Search,
    number: int,
    held: ExitStack,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
) -> Merged | Result:
    """Claim and merge a proposal until `held` is closed; its result, if it has or gives one now.

    Raises as `evaluate`.
    """
    ledger = Ledger(warehouse, search.name)
    proposal = proposal_of(ledger, number)
    held.enter_context(ledger.claim(number))
    known = ledger.result(number)
    if known is not None:
        return known
    merged = merge_candidate(warehouse, search, proposal, held, options, progress)
    return ledger.put_result(merged) if isinstance(merged, Result) else merged


def proposal_of(ledger: Ledger, number: int) -> Proposal:
    """A proposal by its number. Raises NotFoundError."""
    proposals = ledger.proposals()
    if number not in proposals:
        raise NotFoundError(
            "No such candidate",
            where=f"the search {ledger.name}",
            expected=f"a number up to {max(proposals, default=0)}",
            found=str(number),
            next_step=f"see `mergepipe front {ledger.name}`",
        )
    return proposals[number]


def merge_candidate(
    warehouse: Warehouse,
    search: Search,
    proposal: Proposal,
    leases: ExitStack,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
) -> Merged | Result:
    """Merge a proposal's point, leased until `leases` is closed; a failure if it gives no merge."""
    refuse_changed(warehouse, search, progress)
    began_s = time.monotonic()
    try:
        parsed = recipe_of(warehouse, search, proposal)
        plan = plan_in_stages(warehouse, parsed, progress=progress, relative_to=search.folder)
        leases.enter_context(lease(warehouse, plan))
        done = run_plan(warehouse, plan, options=options, progress=progress, is_stage=True)
    except UNMERGEABLE as error:
        return Result.failed(search, proposal, str(error), now())
    cost = MergeCost(
        done.realised.layers_executed,
        done.realised.layers_reused,
        done.realised.expert_bytes_read + done.realised.base_bytes_read,
        plan.read_nbytes,
        round(time.monotonic() - began_s, 3),
    )
    return Merged(proposal, done.snapshot, cost)


def measure(
    warehouse: Warehouse, search: Search, merged: Merged, stop: int | None = None
) -> Result:
    """Return what the evaluator says of a merged candidate; nothing is remembered.

    Raises AbandonedError as soon as the descriptor `stop` can be read, and EvaluationError where
    the evaluator changed while the candidate was merged: that is no failure of the candidate's.
    """
    refuse_other_evaluator(search)
    proposal, snapshot = merged.proposal, merged.snapshot
    failed = snapshot.snapshot_id, merged.cost
    try:
        evaluation = measured(warehouse, snapshot, search.file.evaluator, search.folder, stop=stop)
        values = search.file.values(evaluation.metrics)
    except EvaluationError as error:
        return Result.failed(search, proposal, str(error), now(), *failed)
    except KeyError as error:
        there = ", ".join(evaluation.metrics)
        why = f"the evaluator does not print the metric {error}; it prints {there}"
        return Result.failed(search, proposal, why, now(), *failed)
    if not all(map(isfinite, values)):
        why = "a metric lies too far from its anchors for a number: bring them nearer to it"
        return Result.failed(search, proposal, why, now(), *failed)
    return Result(
        proposal.number,
        proposal.point,
        values,
        dict(evaluation.metrics),
        "",
        snapshot.snapshot_id,
        merged.cost,
        evaluation.seconds,
        now(),
    )


def snapshot_of(
    warehouse: Warehouse,
    search: Search,
    number: int,
    leases: ExitStack,
    progress: Progress | None = None,
) -> Snapshot:
    """The snapshot of an evaluated candidate, leased until `leases` is closed.

    One that was collected is merged again. Raises EvaluationError for one that gives no merge, or
    another one than was measured.
    """
    ledger = Ledger(warehouse, search.name)
    result, proposal = ledger.result(number), proposal_of(ledger, number)
    if result is not None and result.snapshot_id is not None:
        need = Need(snapshot_ids=frozenset([result.snapshot_id]))
        leases.enter_context(warehouse.leases.hold(need, "publish"))
        with suppress(NotFoundError):
            return load_snapshot(warehouse.snapshots, result.snapshot_id)
    merged = merge_candidate(warehouse, search, proposal, leases, progress=progress)
    if isinstance(merged, Result):
        raise EvaluationError(
            "A candidate cannot be merged",
            where=f"candidate {number} of the search {search.name}",
            found=merged.failure,
            next_step="take another one",
        )
    if result is not None and merged.snapshot.snapshot_id != result.snapshot_id:
        raise EvaluationError(
            "A candidate is not merged to what was measured",
            where=f"candidate {number} of the search {search.name}",
            expected=f"snapshot {result.snapshot_id}",
            found=f"{merged.snapshot.snapshot_id}: its plan reads other bytes by now, as it does "
            "where an expert was packed meanwhile",
            next_step=f"remove {ledger.folder / 'results' / f'{number:04d}.json'} and run the "
            "search again to have it measured anew, or take another candidate",
        )
    return merged.snapshot


def recipe_of(warehouse: Warehouse, search: Search, proposal: Proposal) -> ParsedRecipe:
    """The recipe of a proposal's point, parsed."""
    name = f"{search.name}.{proposal.number:04d}"
    text = recipe_text(warehouse, search, proposal.number, proposal.point)
    return parsed_of(search, text, name)


def recipe_text(warehouse: Warehouse, search: Search, number: int, point: Sequence[float]) -> str:
    """The recipe of a point, as text."""
    space = search.space(search_prior(warehouse, search))
    return space.recipe(f"candidate {number} of the search {search.name}", point)
