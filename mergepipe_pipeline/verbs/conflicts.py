"""The verb `conflicts`: how a recipe's experts agree and differ, from catalog sketches alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.facts.expert_stats import common_pairs, ensure_stats
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.fit import refuse_unplaced
from mergepipe_pipeline.resolution.grid import grid_for
from mergepipe_pipeline.resolution.open_models import open_models
from mergepipe_pipeline.resolution.plain_numbers import refuse_coded
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.analysis.conflict_report import ConflictReport

    #: How the experts of each stage conflict, by the stage's name.
    ConflictReports = Mapping[str, ConflictReport]


def conflicts(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    *,
    relative_to: Path | None = None,
    known: Mapping[str, Checkpoint] | None = None,
    progress: Progress | None = None,
) -> ConflictReports:
    """Stage name to how its experts conflict; analyses what the catalog does not know yet.

    A stage without a base to differ from, or on the result of another one, has no report; models
    that are results of stages are not compared. Checkpoints that are `known` by name are not opened
    anew. Raises what opening the models raises.
    """
    stages = (*parsed.before, parsed)
    reports = {
        s.stage or s.name: _of_stage(warehouse, s, relative_to, known or {}, progress)
        for s in stages
    }
    return {name: report for name, report in reports.items() if report is not None}


def _of_stage(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    relative_to: Path | None,
    known: Mapping[str, Checkpoint],
    progress: Progress | None,
) -> ConflictReport | None:
    from mergepipe_pipeline.analysis.conflict_report import conflicts as compare

    base = None if parsed.base is None else parsed.references[parsed.base]
    if base is None or base.model in parsed.stages_used:
        return None
    merged = [parsed.references[n] for n in dict.fromkeys(e.model for e in parsed.entries())]
    experts = [r for r in merged if r is not base and r.model not in parsed.stages_used]
    problems: list[MergePipeError] = []
    models = open_models(warehouse, [base, *experts], 0, relative_to, known, problems)
    if problems:
        raise problems[0]
    if not all(model.is_partial for model in models[1:]):
        refuse_coded(models)
    for model in models[1:]:
        refuse_unplaced(model, models[0])
    grid = grid_for(models[0], parsed.block_elems)
    wanted = [(m, common_pairs(m, models[0])) for m in models[1:]]
    stats = ensure_stats(warehouse, wanted, models[0], grid, progress)
    return compare([m.name for m in models[1:]], stats) if stats else None
