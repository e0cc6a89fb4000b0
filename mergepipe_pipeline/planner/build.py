"""Turns a recipe, catalog facts and a choice of blocks into a `MergePlan`.

The last step of planning. It decides what is covered (bought blocks, and blocks whose delta is
known to be zero, which cost nothing) and what is read (bought blocks only); see `spec.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.dtypes import FLOATING, itemsize
from mergepipe_pipeline.planner.bounds import error_bound, update_norm
from mergepipe_pipeline.planner.candidates import Candidates, Row, lay_out
from mergepipe_pipeline.planner.strategies import Choice, choose
from mergepipe_pipeline.spec.blocks import BlockGrid, Range, coalesce
from mergepipe_pipeline.spec.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.spec.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.spec.operator import OperatorSchema
from mergepipe_pipeline.spec.plan import (
    BaseInput,
    Estimates,
    ExpertInput,
    LayerTask,
    MergePlan,
    Source,
    TensorTask,
    TrimRule,
)
from mergepipe_pipeline.spec.recipe import Params, Recipe, TensorRecipe
from mergepipe_pipeline.spec.stats import ExpertStats, TensorStats

Coefficients = Callable[[Params, tuple[Params, ...]], tuple[float, ...]]


@dataclass(frozen=True)
class PlanInput:
    """One checkpoint with its tensor digests, and its statistics against the base."""

    checkpoint: Checkpoint
    digests: Mapping[str, str]
    stats: ExpertStats | None = None

    def source(self) -> Source:
        """How the engine finds it."""
        c = self.checkpoint
        return Source(c.name, c.root, c.checkpoint_id)


@dataclass(frozen=True)
class TensorFacts:
    """Tensor-scope facts by (expert position, tensor name)."""

    trims: Mapping[tuple[int, str], TrimRule]
    scales: Mapping[tuple[int, str], float]


def build_plan(
    recipe: Recipe,
    schema: OperatorSchema,
    coefficients: Coefficients,
    base: PlanInput | None,
    experts: Sequence[PlanInput],
    facts: TensorFacts,
    grid: BlockGrid,
) -> MergePlan:
    """The plan of `recipe` under its budget and strategy. Raises BudgetError as `choose` does."""
    template = base or experts[0]
    stats = [{s.tensor: s for s in e.stats.tensors} if e.stats else {} for e in experts]
    merged = [t for t in recipe.tensors if _is_merged(template.checkpoint.by_name[t.name], t)]
    rows = _rows(merged, experts, stats, facts, coefficients)
    candidates = lay_out(rows, grid)
    total = int(candidates.nbytes.sum())
    budget_bytes = recipe.budget.resolve(total)
    chosen = choose(candidates, budget_bytes, recipe.strategy)
    inputs = _expert_inputs(
        merged, experts, facts, candidates, chosen, first_source=int(base is not None)
    )

    tasks: dict[str, list[TensorTask]] = {}
    n_layers = layer_count(t.name for t in recipe.tensors)
    for t in recipe.tensors:
        entry = template.checkpoint.by_name[t.name]
        base_input = BaseInput(0, entry, template.digests[t.name])
        experts_in = inputs.get(t.name, ())
        task = TensorTask(
            name=t.name,
            shape=entry.shape,
            out_dtype=_out_dtype(recipe, entry),
            operator=recipe.method if experts_in else "copy",
            params=t.params if experts_in else (),
            seed=recipe.seed,
            base=base_input if base or not experts_in else None,
            experts=experts_in,
        )
        tasks.setdefault(layer_name(t.name, n_layers), []).append(task)
    layers = tuple(LayerTask(n, tuple(tasks[n])) for n in sorted(tasks, key=layer_order))
    sources = ([base] if base else []) + list(experts)
    return MergePlan(
        recipe_name=recipe.name,
        recipe_text=recipe.text,
        method=recipe.method,
        sources=tuple(s.source() for s in sources),
        base_source=0,
        layers=layers,
        ref=recipe.ref,
        estimates=_estimates(
            recipe, schema, merged, candidates, chosen, facts, budget_bytes, total
        ),
        warnings=recipe.warnings,
    )


def _is_merged(entry: TensorEntry, recipe: TensorRecipe) -> bool:
    return bool(recipe.models) and entry.dtype in FLOATING and entry.numel > 0


def _out_dtype(recipe: Recipe, entry: TensorEntry) -> str:
    if entry.dtype not in FLOATING:
        return entry.dtype
    return recipe.out_dtype or recipe.dtype or entry.dtype


def _rows(
    merged: Sequence[TensorRecipe],
    experts: Sequence[PlanInput],
    stats: Sequence[Mapping[str, TensorStats]],
    facts: TensorFacts,
    coefficients: Coefficients,
) -> list[Row]:
    rows = []
    for number, t in enumerate(merged):
        for model, c in zip(t.models, coefficients(t.params, t.model_params), strict=True):
            entry = experts[model].checkpoint.by_name[t.name]
            s = stats[model].get(t.name)
            rows.append(
                Row(
                    tensor=number,
                    position=model,
                    name=f"{t.name}#{model}",
                    numel=entry.numel,
                    itemsize=itemsize(entry.dtype),
                    coefficient=c * facts.scales.get((model, t.name), 1.0),
                    block_l2sq=s.block_l2sq if s else None,
                    block_max_abs=s.block_max_abs if s else None,
                    block_nonzero=s.block_nonzero if s else None,
                )
            )
    return rows


def _expert_inputs(
    merged: Sequence[TensorRecipe],
    experts: Sequence[PlanInput],
    facts: TensorFacts,
    candidates: Candidates,
    chosen: Choice,
    *,
    first_source: int,
) -> dict[str, tuple[ExpertInput, ...]]:
    slices = iter(candidates.row_slices())
    out = {}
    for t in merged:
        inputs = []
        for model, params in zip(t.models, t.model_params, strict=True):
            part = next(slices)
            entry = experts[model].checkpoint.by_name[t.name]
            inputs.append(
                ExpertInput(
                    source=first_source + model,
                    position=model,
                    tensor=entry,
                    sha256=experts[model].digests[t.name],
                    params=params,
                    covered=_ranges(
                        candidates.grid, chosen[part] | candidates.zero[part], entry.numel
                    ),
                    read=_ranges(candidates.grid, chosen[part], entry.numel),
                    trim=facts.trims.get((model, t.name)),
                    scale=facts.scales.get((model, t.name), 1.0),
                )
            )
        out[t.name] = tuple(inputs)
    return out


def _ranges(grid: BlockGrid, taken: Choice, numel: int) -> tuple[Range, ...]:
    return coalesce(grid.range_of(int(b), numel) for b in np.flatnonzero(taken))


def _estimates(
    recipe: Recipe,
    schema: OperatorSchema,
    merged: Sequence[TensorRecipe],
    candidates: Candidates,
    chosen: Choice,
    facts: TensorFacts,
    budget_bytes: int | None,
    total: int,
) -> Estimates:
    reach, negative = [], []
    for t in merged:
        params = dict(t.params)
        normalised = bool(params.get("normalize", False))
        below = any(float(dict(p).get("weight", 1.0)) < 0 for p in t.model_params)
        for model in t.models:
            scale = abs(float(params.get("lambda", 1.0)) * facts.scales.get((model, t.name), 1.0))
            reach.append(scale if normalised else np.nan)
            negative.append(normalised and below)
    bound = error_bound(
        candidates, chosen, schema.response, np.array(reach), np.array(negative, np.bool_)
    )
    known = all(r.block_l2sq is not None for r in candidates.rows)
    return Estimates(
        budget_bytes=budget_bytes,
        strategy=recipe.strategy,
        block_elems=candidates.grid.block_elems,
        expert_bytes_total=total,
        expert_bytes_planned=int(candidates.nbytes[chosen].sum()),
        blocks_total=len(chosen),
        blocks_bought=int(chosen.sum()),
        blocks_zero=int(candidates.zero.sum()),
        error_bound=bound.value,
        bound_note=bound.note,
        update_norm=update_norm(candidates) if known else None,
    )
