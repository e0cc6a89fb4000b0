"""The verb `plan`: what will be read for a recipe under its budget, stored by id.

Earlier stages of a recipe are merged on the way: a plan names the bytes it reads, so what it reads
must be there. Their results are snapshots that nothing publishes, found again by content. While a
merge that follows at once is planned, the disk is idle, and `prefetch_base` reads the base.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Unpack

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.domain.request import RequestedModel
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.execution.gather import gather
from mergepipe_pipeline.execution.lookup import store_plan
from mergepipe_pipeline.execution.plan_leases import lease_until_exit
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.facts.tensor_digests import ensure_digests
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.resolve import (
    Planning,
    ResolvedRecipe,
    requested,
    resolve,
    resolve_stage,
)
from mergepipe_pipeline.storage.source import FetchedAhead, FileRange, open_source
from mergepipe_pipeline.storage.uncached import fits_page_cache
from mergepipe_pipeline.warehouse import Warehouse

#: The plan of one stage over the results of those before it, by name.
Planner = Callable[[ParsedRecipe, Mapping[str, Checkpoint]], MergePlan]


def run_stages(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    plan_stage: Planner,
    progress: Progress | None,
) -> dict[str, Checkpoint]:
    """Stage name to the checkpoint of its result, for all stages before the last."""
    results: dict[str, Checkpoint] = {}
    for stage in parsed.before:
        name = stage.stage or stage.name
        plan = plan_stage(stage, results)
        lease_until_exit(warehouse, plan)
        snapshot = run_plan(warehouse, plan, progress=progress, is_stage=True).snapshot
        results[name] = open_checkpoint(snapshot.path, name)
    return results


#: Long, since after each step the thread waits for its turn in the interpreter.
_STEP_NBYTES = 32 << 20

#: Checkpoints' roots with the tensors to read, in file order.
_Places = list[tuple[str, list[TensorEntry]]]


def is_worth_prefetching(resolved: ResolvedRecipe) -> bool:
    """Whether the base is worth reading before the plan is made.

    What is analysed first is read there, and what the page cache cannot hold would be read twice.
    """
    return not resolved.cost.analysis_bytes and fits_page_cache(resolved.cost.base_bytes)


@contextmanager
def prefetch_base(resolved: ResolvedRecipe) -> Iterator[None]:
    """While the block runs, read the recipe's base in another thread, if that is worth it."""
    if not is_worth_prefetching(resolved):
        yield
        return
    over = threading.Event()
    reader = threading.Thread(target=_read_ahead, args=(_base_tensors(resolved), over), daemon=True)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()


def _base_tensors(resolved: ResolvedRecipe) -> _Places:
    """What is stored of the tensors that experts are merged on."""
    by_root: dict[str, dict[TensorEntry, None]] = {}
    for t in resolved.recipe.tensors:
        if t.base is None:
            continue
        model = resolved.models[t.base.model]
        for part in model.views[t.base.tensor].stored:
            checkpoint = model.checkpoints[part.source]
            if not checkpoint.is_offline:  # decoding would take the cores that planning needs
                by_root.setdefault(checkpoint.root, {})[part.entry] = None
    return [(root, sorted(e, key=lambda e: (e.file, e.start_byte))) for root, e in by_root.items()]


def _read_ahead(places: _Places, over: threading.Event) -> None:
    buffer = memoryview(bytearray(_STEP_NBYTES))
    # What is wrong with a file, the merge says when it comes to it.
    with suppress(MergePipeError, OSError):
        for root, entries in places:
            with open_source(root) as source:
                if isinstance(source, FetchedAhead):
                    source.expect(_range(e) for e in entries)
                for e in entries:
                    for start in range(0, e.nbytes, _STEP_NBYTES):
                        if over.is_set():
                            return
                        piece = buffer[: min(_STEP_NBYTES, e.nbytes - start)]
                        source.read_into(e.file, e.start_byte + start, piece)


def _range(entry: TensorEntry) -> FileRange:
    return FileRange(entry.file, entry.start_byte, entry.start_byte + entry.nbytes)


def make_plan(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    *,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> MergePlan:
    """Resolve the recipe, gather what the planner needs, select blocks, store the plan.

    The `checkpoints` are registered already, and stay so. Raises what `resolve` raises,
    and BudgetError for a budget that the strategy cannot meet.
    """
    resolved, results = resolve_after_stages(warehouse, parsed, progress=progress, **planning)
    return plan_resolved(
        warehouse, resolved, progress, unnamed=results, checkpoints=planning.get("checkpoints")
    )


def resolve_after_stages(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    *,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> tuple[ResolvedRecipe, Mapping[str, Checkpoint]]:
    """The last stage, checked, and the results of those before it, which are merged now.

    Their warnings are among those of the last stage.
    """

    models: list[RequestedModel] = []
    packs: list[str] = []
    inexact: list[str] = []
    warnings: dict[str, None] = {}

    def plan_stage(stage: ParsedRecipe, pending: Mapping[str, Checkpoint]) -> MergePlan:
        resolved = resolve_stage(warehouse, stage, pending, **planning)
        resolved = replace(resolved, inexact=tuple(inexact))
        plan = plan_resolved(
            warehouse, resolved, progress, unnamed=pending, checkpoints=planning.get("checkpoints")
        )
        models.extend(plan.request.models)
        packs.extend(plan.request.packs)
        if resolved.recipe.budget != Budget() and plan.estimates.error_bound != 0:
            inexact.append(stage.stage or stage.name)
        warnings.update(dict.fromkeys(plan.warnings))
        return plan

    if parsed.before:
        resolve(warehouse, parsed, **planning)
    results = run_stages(warehouse, parsed, plan_stage, progress)
    resolved = resolve_stage(warehouse, parsed, results, **planning)
    request = replace(resolved.request, models=tuple(models), packs=tuple(packs))
    warnings.update(dict.fromkeys(resolved.recipe.warnings))
    if inexact:
        warnings[f"{_merged_in_part(inexact)}: an error is of the last stage alone"] = None
    recipe = replace(resolved.recipe, warnings=tuple(warnings))
    resolved = replace(resolved, request=request, recipe=recipe, inexact=tuple(inexact))
    return resolved, results


def _merged_in_part(stages: Sequence[str]) -> str:
    which = f"stage {stages[0]} was" if len(stages) == 1 else f"stages {', '.join(stages)} were"
    return f"{which} merged under the budget, too"


def plan_resolved(
    warehouse: Warehouse,
    resolved: ResolvedRecipe,
    progress: Progress | None = None,
    *,
    unnamed: Mapping[str, Checkpoint] | None = None,
    checkpoints: Mapping[str, Checkpoint] | None = None,
) -> MergePlan:
    """The plan of a checked recipe, stored. Neither `unnamed` results of stages nor `checkpoints`
    are registered.
    """
    inputs = gather(
        warehouse, resolved, progress, unnamed={**(checkpoints or {}), **(unnamed or {})}
    )
    digests = [
        [ensure_digests(warehouse, c, progress) for c in m.checkpoints] for m in inputs.models
    ]
    request = requested(resolved, inputs.models, digests, unnamed or {})
    plan = inputs.builder(digests).build()
    if resolved.inexact:  # their errors are in this stage's inputs
        unknown = replace(
            plan.estimates,
            error_bound=None,
            bound_note=_merged_in_part(resolved.inexact),
            predicted_error=None,
            predicted_margin=None,
        )
        plan = replace(plan, estimates=unknown)
    packs = (*request.packs, *(p.pack_id for p in plan.packs))
    plan = replace(plan, request=replace(request, packs=packs))
    store_plan(warehouse, plan)
    return plan
