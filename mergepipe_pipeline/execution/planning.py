"""The plan of one recipe: what will be read for it under its budget, stored by id.

A plan names the bytes it reads, so the stages before a recipe's last are merged first (`stages`).
While a merge that follows at once is planned, the disk is idle: `prefetch_base` reads the base.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Unpack

from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.domain.request import RequestedModel
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.execution.gather import gather
from mergepipe_pipeline.execution.lookup import store_plan
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.resolve import Planning, ResolvedRecipe, requested, resolve_stage
from mergepipe_pipeline.storage.source import FileRange, LocalSource, open_source
from mergepipe_pipeline.storage.uncached import fits_page_cache
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True)
class StageResults:
    """The results of stages by name, and what plans that build on them say of these stages.

    `inexact` are the names of those that were merged in part.
    """

    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)
    models: tuple[RequestedModel, ...] = ()
    packs: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def after(
        self, name: str, resolved: ResolvedRecipe, plan: MergePlan, result: Checkpoint
    ) -> StageResults:
        """Return them with the result of the next stage."""
        is_whole = resolved.recipe.budget == Budget() or plan.estimates.error_bound == 0
        return StageResults(
            {**self.checkpoints, name: result},
            (*self.models, *plan.request.models),
            (*self.packs, *plan.request.packs),
            self.inexact if is_whole else (*self.inexact, name),
            tuple(dict.fromkeys((*self.warnings, *plan.warnings))),
        )

    def before(self, resolved: ResolvedRecipe) -> ResolvedRecipe:
        """Return a last stage whose plan says what was asked and warned of before it."""
        request = replace(resolved.request, models=self.models, packs=self.packs)
        warnings = dict.fromkeys((*self.warnings, *resolved.recipe.warnings))
        if self.inexact:
            warnings[f"{self.merged_in_part}: an error is of the last stage alone"] = None
        recipe = replace(resolved.recipe, warnings=tuple(warnings))
        return replace(resolved, request=request, recipe=recipe)

    @property
    def merged_in_part(self) -> str:
        """Which stages were merged in part, for people."""
        first, *others = self.inexact
        which = f"stages {', '.join(self.inexact)} were" if others else f"stage {first} was"
        return f"{which} merged under the budget, too"


NO_STAGES = StageResults()


def make_plan(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    stages: StageResults = NO_STAGES,
    *,
    progress: Progress | None = None,
    **planning: Unpack[Planning],
) -> MergePlan:
    """Resolve a recipe on the results of its `stages`, gather what is known, plan, store the plan.

    The `checkpoints` are registered already, and stay so. Raises what `resolve` raises,
    and BudgetError for a budget that the strategy cannot meet.
    """
    resolved = stages.before(resolve_stage(warehouse, parsed, stages.checkpoints, **planning))
    registered = planning.get("checkpoints") or ()
    return plan_resolved(warehouse, resolved, stages, progress, registered=registered)


def plan_resolved(
    warehouse: Warehouse,
    resolved: ResolvedRecipe,
    stages: StageResults = NO_STAGES,
    progress: Progress | None = None,
    *,
    registered: Collection[str] = (),
) -> MergePlan:
    """Return the plan of a checked recipe, stored; what is `registered` by name stays so."""
    unnamed = {*registered, *stages.checkpoints}
    builder, _ = gather(warehouse, resolved, progress, unnamed=unnamed)
    request = requested(resolved, builder.digests, stages.checkpoints)
    plan = builder.build()
    if stages.inexact:  # their errors are in this stage's inputs
        unknown = replace(
            plan.estimates,
            error_bound=None,
            bound_note=stages.merged_in_part,
            predicted_error=None,
            predicted_margin=None,
        )
        plan = replace(plan, estimates=unknown)
    packs = (*request.packs, *(p.pack_id for p in plan.packs))
    plan = replace(plan, request=replace(request, packs=packs))
    store_plan(warehouse, plan)
    return plan


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
    """While the block runs, read the recipe's base in another thread, if that is worth it.

    What the page cache has is left out.
    """
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
    """Return what is stored of the tensors that experts are merged on."""
    by_root: dict[str, dict[TensorEntry, None]] = {}
    for t in resolved.recipe.tensors:
        if t.base is None:
            continue
        model = resolved.models[t.base.model]
        for part in model.views[t.base.tensor].stored:
            checkpoint = model.checkpoints[part.source]
            if not checkpoint.is_offline:  # decoding would take the cores that planning needs
                by_root.setdefault(checkpoint.root, {}).update(dict.fromkeys(part.entries))
    return [(root, sorted(e, key=lambda e: (e.file, e.start_byte))) for root, e in by_root.items()]


def _read_ahead(places: _Places, over: threading.Event) -> None:
    buffer = memoryview(bytearray(_STEP_NBYTES))
    # What is wrong with a file, the merge says when it comes to it.
    with suppress(MergePipeError, OSError):
        for root, entries in places:
            with open_source(root) as source:
                source.expect(_range(e) for e in entries)
                for e in entries:
                    for start in range(0, e.nbytes, _STEP_NBYTES):
                        if over.is_set():
                            return
                        piece = buffer[: min(_STEP_NBYTES, e.nbytes - start)]
                        place = e.file, e.start_byte + start
                        if not (isinstance(source, LocalSource) and source.has(*place, len(piece))):
                            source.read_into(*place, piece)


def _range(entry: TensorEntry) -> FileRange:
    return FileRange(entry.file, entry.start_byte, entry.start_byte + entry.nbytes)
