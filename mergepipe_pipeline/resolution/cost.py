"""The cost of a merge in bytes, from headers and from what the catalog knows.

This is an estimate before planning: the planner decides what is read under a budget, and the
outcome of a run says what was read.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.layers import layer_count, layer_name
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.output import is_kept, is_merged, out_nbytes, stored_like
from mergepipe_pipeline.domain.recipe import Recipe, pairs_of
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.planner.constraints import lacks_base
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes that a merge will read and write, before the catalog's help.

    `analysis_bytes` is read once to learn what is not known yet; `budget_bytes` None is no limit.
    Expert bytes read will be at most min(budget, total).
    """

    expert_bytes_total: int
    budget_bytes: int | None
    base_bytes: int
    output_bytes: int
    analysis_bytes: int
    free_bytes: int
    layers: int
    tensors: int


def estimate(
    warehouse: Warehouse,
    recipe: Recipe,
    models: Sequence[Model],
    grid: BlockGrid,
) -> Cost:
    """The cost of a recipe.

    Raises BudgetError for a budget that leaves out what no base can stand in for.
    """
    total = baseless = output = base = 0
    names = [t.name for t in recipe.tensors]
    reads_base = OPERATORS[recipe.method].schema.base != "none"
    for t in recipe.tensors:
        like = stored_like(t, models)
        floating = like.dtype in FLOATING
        output += out_nbytes(recipe, t, models)
        base += like.nbytes if (t.base and reads_base) or not t.inputs or not floating else 0
        is_left = t.base is not None and is_kept(recipe.budget, t.name)
        for i in t.inputs if floating else ():
            nbytes = models[i.model].views[i.tensor].nbytes
            total += 0 if is_left else nbytes
            baseless += nbytes if t.base is None else 0
    budget, n_layers = recipe.budget.resolve(total), layer_count(names)
    if budget is not None and budget < baseless:
        raise lacks_base(baseless, budget)
    merged = pairs_of(t for t in recipe.tensors if is_merged(t, models))
    return Cost(
        expert_bytes_total=total,
        budget_bytes=budget,
        base_bytes=base,
        output_bytes=output,
        analysis_bytes=_unknown_nbytes(warehouse, models, merged, grid),
        free_bytes=shutil.disk_usage(warehouse.root).free,
        layers=len({layer_name(n, n_layers) for n in names}),
        tensors=len(names),
    )


def _unknown_nbytes(
    warehouse: Warehouse,
    models: Sequence[Model],
    pairs: Mapping[tuple[int, int], Sequence[tuple[str, str]]],
    grid: BlockGrid,
) -> int:
    """Bytes to read for what is not known yet."""
    # It loads Numba, which looking for checkpoints does without.
    from mergepipe_pipeline.facts.analysed import AnalysedExpert

    nbytes = 0
    base_nbytes: dict[tuple[int, str], int] = {}  # read once for all experts
    paired = {expert for expert, _ in pairs}

    def missing(numbers: tuple[int, int]) -> list[tuple[str, str]]:
        expert, base = (models[n] for n in numbers)
        return AnalysedExpert(warehouse, expert, base, grid, pairs[numbers]).missing()

    with Workers(threads.CATALOG) as workers:
        for (expert, base), tensor_pairs in zip(pairs, workers.map(missing, pairs), strict=True):
            for tensor, base_tensor in tensor_pairs:
                view = models[expert].views[tensor]
                nbytes += view.nbytes
                if view.delta_needs_base:
                    base_nbytes[base, base_tensor] = models[base].views[base_tensor].nbytes
    for number, model in enumerate(models):
        if number not in paired and not any(base == number for _, base in pairs):
            known = warehouse.catalog.digests
            nbytes += sum(c.nbytes for c in model.checkpoints if known(c.checkpoint_id) is None)
    return nbytes + sum(base_nbytes.values())
