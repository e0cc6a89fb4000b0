"""The verbs of a standing recipe: plan, merge, measure, judge and release it.

A recipe's wanted state is a digest of what it says and of its inputs' contents as indexed. It is
compared with the state recorded at the last release, so no event can be missed and none is acted on
twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.deploy.arrivals import arrival
from mergepipe_pipeline.deploy.inbox import (
    problem_now,
    reason_to_wait_for_index,
    reason_to_wait_for_joining,
)
from mergepipe_pipeline.deploy.messages import ShardTask
from mergepipe_pipeline.deploy.recipe_files import (
    RecipeFile,
    release_reason,
    released_by_another,
)
from mergepipe_pipeline.deploy.recorded import (
    blaming_inputs,
    reason_to_wait_for,
    recorded_inputs,
    refuse_changed_inputs,
    states_of,
)
from mergepipe_pipeline.deploy.shards import merged_layers, run_recorded
from mergepipe_pipeline.deploy.standing import Standing, not_indexed, standing, wanted, wanted_of
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.evaluation import Evaluation
from mergepipe_pipeline.domain.outcome import LayerOutcome, Realised
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.snapshot import MANIFEST, Ref, Snapshot
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import (
    BudgetError,
    BusyError,
    CorruptionError,
    DamagedLayerError,
    NotFoundError,
)
from mergepipe_pipeline.execution.assemble import commit
from mergepipe_pipeline.execution.lookup import (
    WorkingPlan,
    forget_other_plans,
    load_plan,
    load_working_plan,
    store_working_plan,
    working_plan,
)
from mergepipe_pipeline.execution.plan_leases import lease, lease_layers, lease_recipe
from mergepipe_pipeline.execution.run import made_anew
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.execution.throughput import UNKNOWN, expected_s, nbytes_of_plan
from mergepipe_pipeline.facts.damaged_packs import refuse_damaged
from mergepipe_pipeline.integrity.weights import (
    MEND,
    MOST_NAMED,
    Audit,
    audit_snapshot,
    is_over_budget,
    non_finite_inputs,
    refuse_unfit,
)
from mergepipe_pipeline.quality.evaluators import evaluator_id
from mergepipe_pipeline.quality.measure import evaluate
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.storage.forms import keep_record, kept_record
from mergepipe_pipeline.text import listed
from mergepipe_pipeline.verbs.conflicts import conflicts
from mergepipe_pipeline.verbs.gate import (
    Judged,
    judge_candidate,
    refuse,
    refuse_unready,
    refused_before,
    require_evaluator,
)
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.verbs.conflicts import ConflictReports

_LOG = logging.getLogger("mergepipe")
#: Why nothing is due of a recipe whose last release is what it wants.
CURRENT = "the release is current"


@dataclass(frozen=True, slots=True)
class Due:
    """A release that is to be made: the state that is wanted, and how many there were before.

    `inputs` changes with every version of an input, one of the same contents too, and with the
    recipe's evaluator: that was mended.
    """

    wanted: str
    sequence: int
    inputs: str


@dataclass(frozen=True, slots=True)
class Release:
    """The last release of a recipe; `sequence` counts its releases."""

    recipe: str
    sequence: int
    wanted: str
    plan_id: str
    snapshot_id: str


def current(file: RecipeFile) -> Standing:
    """Where a recipe is whose last release is what it wants."""
    return standing(file, "current", CURRENT)


def due(warehouse: Warehouse, file: RecipeFile) -> Due | Standing:
    """The next release of a recipe, or where the recipe is that none is to be made now.

    An evaluator that is not there could not measure what is merged, and a record that cannot be
    read says nothing: such a recipe cannot be used, and stops no other one.
    """
    if waiting := reason_to_wait_for_index(warehouse, file):
        return standing(file, "waiting", waiting)
    problem = problem_now(warehouse, file)
    if problem is not None:
        return standing(file, "cannot be used", problem)
    try:
        return _due(warehouse, file)
    except Exception as error:
        return standing(file, "cannot be used", str(error))


def _due(warehouse: Warehouse, file: RecipeFile) -> Due | Standing:
    waiting = reason_to_wait_for(warehouse, file.members)
    waiting = waiting or reason_to_wait_for_joining(warehouse, file)
    state = None if waiting else wanted(warehouse, file)
    if state is None:
        return standing(file, "waiting", waiting or not_indexed(warehouse, file))
    last = last_release(warehouse, file.name)
    if last and last.wanted == state and _is_there(warehouse, file, last):
        return current(file)
    refused = refused_before(warehouse, file, state)
    if refused is not None:
        return standing(file, "refused", refused.summary)
    evaluator = file.recipe.evaluator
    refuse_unready(evaluator, file.folder)
    inputs: list[int | str] = [warehouse.catalog.get(m).version for m in file.members]
    if evaluator is not None:
        inputs.append(evaluator_id(evaluator, file.folder))
    return Due(state, last.sequence if last else 0, digest_json(inputs)[:8])


def _is_there(warehouse: Warehouse, file: RecipeFile, release: Release) -> bool:
    """Whether a release has its snapshot and its ref a version, not of another recipe.

    A person may have rolled back.
    """
    refs, ref = warehouse.refs, file.recipe.ref
    snapshot_id = release.snapshot_id
    is_named = ref in refs and not released_by_another(refs, ref, file.name, snapshot_id)
    return is_named and (warehouse.snapshots / snapshot_id / MANIFEST).is_file()


def conflicts_of_recipe(warehouse: Warehouse, file: RecipeFile) -> ConflictReports:
    """How the experts of a recipe conflict, by stage, as they were indexed. See `conflicts`.

    Raises InputChangedError.
    """
    inputs = recorded_inputs(warehouse, file.members)
    with blaming_inputs(warehouse, states_of(warehouse, inputs)):
        return conflicts(
            warehouse,
            file.recipe,
            relative_to=warehouse.recipes,
            known=_unpinned(inputs, file),
        )


def _unpinned(inputs: Mapping[str, Checkpoint], file: RecipeFile) -> dict[str, Checkpoint]:
    """The inputs of which no revision is asked for: others are looked up by it."""
    return {name: c for name, c in inputs.items() if name not in file.pinned}


def plan_recipe(warehouse: Warehouse, file: RecipeFile, *, budget: str | None = None) -> MergePlan:
    """Plan a recipe of the warehouse and remember the plan as its current one.

    `budget` stands for the recipe's amount; what the recipe wants stays what its file says, so that
    a release of this plan answers it and nothing asks for another. Raises BusyError while somebody
    else works on the recipe, InputChangedError if an input is not as it was indexed; so do the
    verbs after it. Raises DamagedPackError for a damaged pack, which is set aside: to plan without
    it would buy far less.
    """
    with lease_recipe(warehouse, file.name):
        inputs = recorded_inputs(warehouse, file.members)
        states = states_of(warehouse, inputs)
        refuse_damaged(warehouse, {name: arrival(warehouse, name).packed.packs for name in inputs})
        with blaming_inputs(warehouse, states):
            plan = plan_in_stages(
                warehouse,
                file.recipe,
                relative_to=warehouse.recipes,
                checkpoints=_unpinned(inputs, file),
                budget=budget,
            )
        sha256 = store_working_plan(warehouse, file.name, plan)
        state = wanted_of(warehouse, file, inputs.values()) or ""
        working = WorkingPlan(plan.plan_id, sha256, state, states)
        remove_tree(warehouse.layer_records_dir(file.name))
        keep_record(warehouse.current_plan_path(file.name), working)
        forget_other_plans(warehouse, file.name, sha256)
    return plan


def current_plan(warehouse: Warehouse, recipe: str) -> MergePlan:
    """The plan that `plan_recipe` made last. Raises NotFoundError, CorruptionError."""
    return _planned(warehouse, recipe, working_plan(warehouse, recipe))


def _planned(warehouse: Warehouse, recipe: str, working: WorkingPlan) -> MergePlan:
    try:
        return load_working_plan(warehouse, recipe, working)
    except (CorruptionError, NotFoundError) as error:
        error.next_step = f"materialize {recipe}/plan: it plans anew"
        raise


def seconds_to_merge(warehouse: Warehouse, plan: MergePlan) -> float | str:
    """The seconds that merging a plan may take here, or why nobody can say."""
    seconds = expected_s(warehouse, nbytes_of_plan(plan))
    return UNKNOWN if seconds is None else float(f"{seconds:.4g}")


def refuse_other_budget(plan: MergePlan, budget: str | None) -> None:
    """Raise BudgetError where a run asks for a budget that the plan was not made with."""
    if budget is not None and plan.request.budget != budget:
        raise BudgetError(
            "The current plan has another budget than this run asks for",
            where=plan.recipe_name,
            expected=budget,
            found=plan.request.budget or "the recipe's own",
            next_step=f"materialize {plan.recipe_name}/plan in the same run, or leave the budget "
            "out of its configuration",
        )


def merge_recipe(
    warehouse: Warehouse, recipe: str, layers: Sequence[str], options: EngineOptions
) -> Iterator[LayerOutcome]:
    """Run or reuse layers of the recipe's current plan, and remember what they cost."""
    with _working(warehouse, recipe) as (_, plan):
        yield from run_recorded(warehouse, recipe, plan, layers, options)


def merge_shard(warehouse: Warehouse, task: ShardTask) -> Iterator[LayerOutcome]:
    """The same for a shard of a plan, while others merge its other shards, here or elsewhere.

    Waits for others who merge a layer of it. Raises BusyError if the plan is not current any more.
    """
    recipe, shard = task.recipe, task.shard
    with _working(warehouse, recipe, shared=True) as (_, current):
        if current.plan_id != task.plan_id:
            raise BusyError(
                "A recipe was planned anew while its shards were merged",
                where=recipe,
                expected=f"plan {task.plan_id[:16]}",
                found=f"plan {current.plan_id[:16]}",
                next_step=f"materialize {recipe}/merge: layers that both plans have are reused",
            )
        with lease_layers(warehouse, [x for x in current.layers if x.name in shard.layers]):
            names, options = shard.layers, task.options
            yield from run_recorded(warehouse, recipe, current, names, options, shard.number)


def snapshot_recipe(
    warehouse: Warehouse, recipe: str, options: EngineOptions | None = None
) -> tuple[Snapshot, Realised]:
    """Commit the snapshot of the recipe's current plan and remember it as its current one.

    Layers that are damaged where they are stored are merged again first. Returns what the plan's
    layers cost, over all runs that worked on it.
    """
    with _working(warehouse, recipe) as (working, plan):

        def committed() -> tuple[Snapshot, Realised]:
            realised = Realised.total(r.cost for r in merged_layers(warehouse, recipe, plan))
            return commit(warehouse, plan, realised)[0], realised

        try:
            snapshot, realised = committed()
        except DamagedLayerError as error:
            _LOG.warning("%s", made_anew(error))
            layers = [layer.name for layer in plan.layers]
            list(run_recorded(warehouse, recipe, plan, layers, options or EngineOptions()))
            snapshot, realised = committed()
        done = replace(working, snapshot_id=snapshot.snapshot_id)
        keep_record(warehouse.current_plan_path(recipe), done)
    return snapshot, realised


@contextmanager
def _working(
    warehouse: Warehouse, recipe: str, *, shared: bool = False
) -> Iterator[tuple[WorkingPlan, MergePlan]]:
    """The current work of a recipe, for nobody else to change, and its plan with all it needs."""
    with lease_recipe(warehouse, recipe, shared=shared):
        working = working_plan(warehouse, recipe)
        plan = _planned(warehouse, recipe, working)
        with lease(warehouse, plan), blaming_inputs(warehouse, working.inputs):
            yield working, plan


def current_snapshot(warehouse: Warehouse, recipe: str) -> Snapshot:
    """The snapshot that `snapshot_recipe` committed last. Raises NotFoundError."""
    working = working_plan(warehouse, recipe)
    if not working.snapshot_id:
        raise NotFoundError(
            "A recipe's current plan has no snapshot yet",
            where=recipe,
            found=f"plan {working.plan_id[:16]}",
            next_step=f"materialize {recipe}/snapshot first",
        )
    return load_snapshot(warehouse.snapshots, working.snapshot_id)


def candidate(warehouse: Warehouse, file: RecipeFile) -> tuple[Snapshot, str | None]:
    """The recipe's current snapshot and the state that it answers. Raises NotFoundError.

    None for one of another budget than the recipe's, which says nothing of what the recipe wants.
    """
    snapshot, working = current_snapshot(warehouse, file.name), working_plan(warehouse, file.name)
    is_own = _planned(warehouse, file.name, working).request.budget is None
    return snapshot, working.wanted if is_own else None


def evaluate_recipe(warehouse: Warehouse, file: RecipeFile) -> tuple[Evaluation, Path]:
    """Measure the recipe's current snapshot, once for each snapshot; the log's path comes with it.

    Raises EvaluationError, NotFoundError, BusyError.
    """
    evaluator = require_evaluator(file.recipe)
    with lease_recipe(warehouse, file.name):
        snapshot, _ = candidate(warehouse, file)
        evaluation = evaluate(warehouse, snapshot, evaluator, file.folder)
    path = warehouse.evaluation_path(evaluation.snapshot_id, evaluation.evaluator_id)
    return evaluation, path.with_suffix(".log")


def judge_recipe(warehouse: Warehouse, file: RecipeFile) -> Judged:
    """Hold the recipe's current snapshot against its gate, and remember what that refuses.

    Raises EvaluationError, NotFoundError, BusyError.
    """
    with lease_recipe(warehouse, file.name):
        return judge_candidate(warehouse, file, *candidate(warehouse, file))


def release_recipe(warehouse: Warehouse, file: RecipeFile) -> tuple[Ref, Release]:
    """Publish the recipe's current snapshot under its ref and record what it was made from.

    Exactly this snapshot passes the recipe's gate and is audited first, whoever did so before.
    Raises GateError, InputChangedError if its inputs are not those that were planned,
    CorruptionError, and MergePipeError for one that no reader should get.
    """
    with lease_recipe(warehouse, file.name):
        expected = None
        if file.recipe.gate is not None:
            judged = judge_candidate(warehouse, file, *candidate(warehouse, file))
            refuse(judged, file.name, file.recipe.ref)
            expected = judged.live_version
        snapshot = current_snapshot(warehouse, file.name)
        working = working_plan(warehouse, file.name)
        audit = audit_snapshot(warehouse, file.name, snapshot)
        refuse_unfit(audit, _planned(warehouse, file.name, working))
        refuse_changed_inputs(warehouse, working.inputs)
        last = last_release(warehouse, file.name)
        ref = publish(
            warehouse,
            snapshot.snapshot_id,
            file.recipe.ref,
            reason=release_reason(file.name),
            expected=expected,
            audit=False,
        )
        done = Release(
            file.name,
            (last.sequence if last else 0) + 1,
            working.wanted,
            snapshot.manifest.plan_id,
            snapshot.snapshot_id,
        )
        keep_record(warehouse.release_path(file.name), done)
    return ref, done


def last_release(warehouse: Warehouse, recipe: str) -> Release | None:
    """The recipe's last release, or None; a damaged record is said and counts as none."""
    return kept_record(warehouse.release_path(recipe), Release)


def audit_recipe(warehouse: Warehouse, recipe: str) -> tuple[Audit, str]:
    """Read every byte of the recipe's current snapshot, whoever audited it before.

    The text says whether all weights are finite: else which tensors are not, in which files, and
    which inputs gave it. Raises CorruptionError with the file and tensor that is wrong,
    NotFoundError.
    """
    snapshot = current_snapshot(warehouse, recipe)
    audit = audit_snapshot(warehouse, recipe, snapshot, anew=True)
    if not audit.non_finite:
        return audit, "Every weight is finite."
    entries = open_checkpoint(snapshot.path, snapshot.snapshot_id[:12]).by_name
    files = listed(sorted({entries[n].file for n in audit.non_finite}), MOST_NAMED, "files more")
    held = list[str]()
    with suppress(NotFoundError, CorruptionError):
        plan = load_plan(warehouse, snapshot.manifest.plan_id)
        held = non_finite_inputs(plan, list(audit.non_finite)[:MOST_NAMED])
    inputs = f"; such values are in {' and '.join(held)}" if held else ""
    found = f"NaN or infinity: {audit.summary}; file {files} of {snapshot.path}{inputs}"
    return audit, f"{found}. Next: {MEND}"


def excess(plan: MergePlan) -> str | None:
    """How much a plan reads beyond its budget, and where most of that is; None for one within."""
    e = plan.estimates
    if e.budget_bytes is None or not is_over_budget(plan):
        return None
    inputs = ((t.name, e) for layer in plan.layers for t in layer.tasks for e in t.experts)
    tensor, most = max(inputs, key=lambda pair: pair[1].read_nbytes)
    view = most.view
    (part, *_) = (*view.stored, *(view.low_rank.parts if view.low_rank else ()))
    source = plan.sources[part.source]
    return (
        f"{e.expert_bytes_planned} bytes of experts would be read, "
        f"{e.expert_bytes_planned - e.budget_bytes} more than the budget of {e.budget_bytes}; "
        f"most, {most.read_nbytes}, from expert {source.name}, file {part.entry.file} of "
        f"{source.root}, tensor {tensor}. "
        f"Plan {plan.plan_id}. Next: materialize the plan again"
    )
