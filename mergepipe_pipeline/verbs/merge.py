"""The verb `merge`: from a recipe to a snapshot, a folder and a ref.

Everything that a caller can refuse beforehand (device, folder, recipe) is looked at before a weight
is read. CLI and Python API call this; Dagster runs its steps one by one (`verbs.deploy`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from mergepipe_pipeline.domain.outcome import RunStart
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.snapshot import Ref
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import DamagedPackError
from mergepipe_pipeline.execution.plan_leases import refuse_full_disk
from mergepipe_pipeline.execution.planning import StageResults, plan_resolved, prefetch_base
from mergepipe_pipeline.execution.run import MergeOutcome, run_plan
from mergepipe_pipeline.execution.stages import merge_stages
from mergepipe_pipeline.integrity.weights import non_finite_warning
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.quality.measure import evaluations_of
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.remote.fetch import METER
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.resolution.resolve import Planning, ResolvedRecipe, resolve_stage
from mergepipe_pipeline.snapshots.export import Shards, check_out, export_snapshot
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.verbs.gate import Judged, pass_gate, refuse_unready
from mergepipe_pipeline.verbs.publish import publish, refuse_kept_out
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True)
class Merged:
    """A merged recipe: what it cost, and where its result can be found.

    `non_finite` counts NaN and infinite elements by tensor; `folder`, `ref` and `judged` are None
    where nobody asked for them.
    """

    outcome: MergeOutcome
    non_finite: dict[str, int]
    folder: Path | None = None
    ref: Ref | None = None
    judged: Judged | None = None

    def summary(self) -> dict[str, Any]:
        """The figures of `merge --json`."""
        figures = {**self.outcome.summary(), "non_finite": self.non_finite}
        if self.folder is not None:
            figures["path"] = figures["out"] = str(self.folder)
        if self.ref is not None:
            figures["ref"], figures["ref_version"] = self.ref.name, self.ref.number
        if self.judged is not None:
            figures["metrics"] = dict(self.judged.evaluation.metrics)
            figures["gate"] = self.judged.verdict and self.judged.verdict.summary
        return figures


def merge(
    warehouse: Warehouse,
    recipe: str | Path | ParsedRecipe,
    *,
    options: EngineOptions | None = None,
    out: str | Path | None = None,
    publish_ref: bool = False,
    fresh: bool = False,
    progress: Progress | None = None,
    began_s: float | None = None,
    **planning: Unpack[Planning],
) -> Merged:
    """Plan and merge a recipe; registers and analyses what is not known yet.

    Args:
        warehouse: made if it is not there, when nothing is refused.
        recipe: a file, or a recipe as written; stages before its last are merged first.
        options: speed, memory and device; never the result.
        out: also write a plain Hugging Face folder here.
        publish_ref: also publish under the recipe's ref.
        fresh: merge layers that are in the action cache, too.
        progress: draws the work and shows warnings.
        began_s: when the caller began (`time.monotonic`), for the time that is reported.
        planning: what stands for the recipe's own budget, strategy and block size.

    Raises what `check` raises, BudgetError, DeviceError, CheckpointChangedError, StorageFullError,
    CommitConflictError, and EvaluationError or GateError before there is a folder or a ref.
    """
    began_s, progress = began_s or time.monotonic(), progress or Silent()
    downloaded = partial(METER.since, METER.total)
    (options := options or EngineOptions()).check()
    folder = None if out is None else check_out(out, warehouse.root)
    parsed = recipe if isinstance(recipe, ParsedRecipe) else load_recipe(recipe, warehouse)
    here = refuse_unready(parsed.evaluator, planning.get("relative_to"))
    warehouse.ensure()
    stages = merge_stages(warehouse, parsed, progress=progress, **planning)
    resolved = stages.before(resolve_stage(warehouse, parsed, stages.checkpoints, **planning))
    if resolved.cost.analysis_bytes:  # of known experts, layers may be there
        refuse_full_disk(warehouse.root, resolved.cost.output_bytes)
    began_s = time.monotonic() if parsed.before else began_s
    start = RunStart(began_s, downloaded)
    run = partial(run_plan, options=options, progress=progress, start=start, fresh=fresh)
    plan, outcome = _planned_and_run(warehouse, resolved, stages, progress, run)
    made = Need(snapshot_ids=frozenset([outcome.snapshot.snapshot_id]))
    with warehouse.leases.hold(made, "merge"):  # an evaluator may take hours
        progress.warn(*non_finite_warning(outcome.non_finite, plan))
        judged = pass_gate(warehouse, parsed, here, outcome.snapshot, parsed.ref)
        wanted = plan.ref if publish_ref else None
        ref = _handed_on(warehouse, outcome, folder, wanted, judged, progress)
    return Merged(outcome, outcome.non_finite, folder, ref, judged)


def _planned_and_run(
    warehouse: Warehouse,
    resolved: ResolvedRecipe,
    stages: StageResults,
    progress: Progress,
    run: Callable[[Warehouse, MergePlan], MergeOutcome],
) -> tuple[MergePlan, MergeOutcome]:
    """Plan and run; once more for each pack that turns out to be damaged, without it."""
    warned: set[str] = set()
    while True:
        with prefetch_base(resolved):
            plan = plan_resolved(warehouse, resolved, stages, progress)
        progress.warn(*(warning for warning in plan.warnings if warning not in warned))
        warned.update(plan.warnings)
        try:
            return plan, run(warehouse, plan)
        except DamagedPackError as error:
            progress.warn(f"{error.what} ({error.where}): the merge begins again without it")


def _handed_on(
    warehouse: Warehouse,
    outcome: MergeOutcome,
    folder: Path | None,
    ref: str | None,
    judged: Judged | None,
    progress: Progress,
) -> Ref | None:
    """Give the snapshot the folder and the ref that were asked for. Raises GateError."""
    snapshot = outcome.snapshot
    if ref is not None:
        is_guarded = judged is not None and judged.verdict is not None
        refuse_kept_out(warehouse, snapshot, ref, is_guarded=is_guarded)
    if folder is not None:
        export(warehouse, snapshot.snapshot_id, folder)
    if ref is None:
        return None
    expected = None if judged is None else judged.live_version
    return publish(
        warehouse,
        snapshot.snapshot_id,
        ref,
        expected=expected,
        checked=outcome.checked,
        progress=progress,
    )


def export(warehouse: Warehouse, snapshot_id: str, out: Path, shards: Shards | None = None) -> None:
    """Copy a snapshot to `out`, with what was measured of it; in `shards` of another size.

    Raises what `export_snapshot` raises.
    """
    measured = [asdict(e) for e in evaluations_of(warehouse, snapshot_id)]
    export_snapshot(load_snapshot(warehouse.snapshots, snapshot_id), out, measured, shards)
