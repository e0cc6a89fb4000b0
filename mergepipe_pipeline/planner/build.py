"""Turns a recipe, catalog facts and a choice of blocks into a `MergePlan`.

The last step of planning. It decides what is covered (bought blocks, and blocks whose delta is
known to be zero, which cost nothing) and what is read (bought blocks only); see `spec.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mergepipe_pipeline.dtypes import FLOATING, itemsize
from mergepipe_pipeline.planner.bounds import error_bound, update_norm
from mergepipe_pipeline.planner.candidates import Candidates, Row, lay_out
from mergepipe_pipeline.planner.strategies import Choice, choose
from mergepipe_pipeline.spec.blocks import BlockGrid, Range, coalesce
from mergepipe_pipeline.spec.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.spec.model import Model, view_sha256
from mergepipe_pipeline.spec.operator import Choosing, OperatorSchema, Response
from mergepipe_pipeline.spec.plan import (
    BaseInput,
    ConfigValue,
    Estimates,
    ExpertInput,
    LayerTask,
    MergePlan,
    SideFiles,
    Source,
    TensorTask,
    TrimRule,
)
from mergepipe_pipeline.spec.recipe import Params, Recipe, TensorRecipe
from mergepipe_pipeline.spec.stats import ExpertStats, TensorStats
from mergepipe_pipeline.spec.view import TensorView, moved

Coefficients = Callable[[Params, tuple[Params, ...], tuple[float, ...]], tuple[float, ...]]


@dataclass(frozen=True)
class Method:
    """What planning needs of an operator: the cᵢ of its δᵢ, and how it answers to parameters."""

    schema: OperatorSchema
    coefficients: Coefficients
    response: Callable[[Params], Response]


@dataclass(frozen=True)
class PlanInput:
    """One model with the digests of its checkpoints' tensors."""

    model: Model
    digests: Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Side:
    """As `spec.plan.SideFiles`, with the template's model number."""

    template: int
    config: tuple[tuple[str, ConfigValue], ...] = ()
    files: tuple[tuple[str, str], ...] | None = None


@dataclass(frozen=True)
class TensorFacts:
    """Facts of whole tensors, by (output tensor, input number) or by output tensor.

    `chosen`: the operator, its parameters per tensor and per model, and the reason, where the
    recipe's method leaves the choice open.
    """

    trims: Mapping[tuple[str, int], TrimRule]
    outliers: Mapping[tuple[str, int], TrimRule]
    scales: Mapping[tuple[str, int], float]
    measured: Mapping[str, tuple[float, ...]]
    chosen: Mapping[str, Choosing]


@dataclass(frozen=True)
class _Part:
    """One merged output tensor on its way to a task."""

    recipe: TensorRecipe
    operator: str
    params: Params
    model_params: tuple[Params, ...]
    facts: tuple[float, ...]
    reason: str
    shape: tuple[int, ...]


class PlanBuilder:
    """Builds the plan of one recipe; `stats` are by (expert's model number, base's)."""

    def __init__(
        self,
        recipe: Recipe,
        methods: Mapping[str, Method],
        inputs: Sequence[PlanInput],
        stats: Mapping[tuple[int, int], ExpertStats],
        facts: TensorFacts,
        grid: BlockGrid,
        side: Side,
    ) -> None:
        self._recipe, self._methods, self._inputs = recipe, methods, inputs
        self._stats, self._facts, self._grid, self._side = stats, facts, grid, side
        counts = [len(i.model.checkpoints) for i in inputs]
        self._first_source = [sum(counts[:n]) for n in range(len(counts))]

    def build(self) -> MergePlan:
        """The plan under the recipe's budget and strategy. Raises BudgetError as `choose` does."""
        recipe = self._recipe
        parts = [self._part(t) for t in recipe.tensors if self._is_merged(t)]
        rows = [row for number, part in enumerate(parts) for row in self._rows(number, part)]
        candidates = lay_out(rows, self._grid)
        total = int(candidates.nbytes.sum())
        budget_bytes = recipe.budget.resolve(total)
        chosen = choose(candidates, budget_bytes, recipe.strategy)
        merged = self._merged_tasks(parts, candidates, chosen)
        tasks: dict[str, list[TensorTask]] = {}
        n_layers = layer_count(t.name for t in recipe.tensors)
        for t in recipe.tensors:
            task = merged.get(t.name) or self._copy(t)
            tasks.setdefault(layer_name(t.name, n_layers), []).append(task)
        sources = [
            Source(c.name, c.root, c.checkpoint_id, c.stamp)
            for i in self._inputs
            for c in i.model.checkpoints
        ]
        return MergePlan(
            recipe_name=recipe.name,
            recipe_text=recipe.text,
            method=recipe.method,
            sources=tuple(sources),
            roles=tuple(
                "base" if number == recipe.base else "expert"
                for number, i in enumerate(self._inputs)
                for _ in i.model.checkpoints
            ),
            layers=tuple(LayerTask(n, tuple(tasks[n])) for n in sorted(tasks, key=layer_order)),
            side=SideFiles(
                self._first_source[self._side.template], self._side.config, self._side.files
            ),
            ref=recipe.ref,
            estimates=self._estimates(parts, candidates, chosen, budget_bytes, total),
            warnings=recipe.warnings,
        )

    def _view(self, model: int, tensor: str) -> TensorView:
        return moved(self._inputs[model].model.views[tensor], self._first_source[model])

    def _sha256(self, model: int, tensor: str) -> str:
        i = self._inputs[model]
        return view_sha256(i.model.views[tensor], list(i.digests))

    def _is_merged(self, t: TensorRecipe) -> bool:
        if not t.inputs:
            return False
        like = self._like(t)
        return like.dtype in FLOATING and like.numel > 0

    def _like(self, t: TensorRecipe) -> TensorView:
        """The view that gives an output tensor its shape and dtype: the base's, or the first."""
        if t.base is not None:
            return self._inputs[t.base.model].model.views[t.base.tensor]
        first = t.inputs[0]
        return self._inputs[first.model].model.views[first.tensor]

    def _out_dtype(self, like: TensorView) -> str:
        if like.dtype not in FLOATING:
            return like.dtype
        return self._recipe.out_dtype or self._recipe.dtype or like.dtype

    def _part(self, t: TensorRecipe) -> _Part:
        chosen = self._facts.chosen.get(t.name)
        own = Choosing(self._recipe.method, t.params, tuple(i.params for i in t.inputs), "")
        choosing = chosen or own
        return _Part(
            t,
            choosing.operator,
            choosing.params,
            choosing.model_params,
            () if chosen else self._facts.measured.get(t.name, ()),
            choosing.reason,
            self._like(t).shape,
        )

    def _stats_of(self, t: TensorRecipe, number: int) -> TensorStats | None:
        entry = t.inputs[number]
        if t.base is None:
            return None
        stats = self._stats.get((entry.model, t.base.model))
        return stats.by_pair.get((entry.tensor, t.base.tensor)) if stats else None

    def _rows(self, number: int, part: _Part) -> list[Row]:
        t = part.recipe
        if part.operator == "copy":
            return []
        coefficients = self._methods[part.operator].coefficients(
            part.params, part.model_params, part.facts
        )
        rows = []
        for i, (entry, c) in enumerate(zip(t.inputs, coefficients, strict=True)):
            view = self._inputs[entry.model].model.views[entry.tensor]
            s = self._stats_of(t, i)
            rows.append(
                Row(
                    tensor=number,
                    position=entry.position,
                    name=f"{t.name}#{entry.position}",
                    numel=view.numel,
                    itemsize=itemsize(view.dtype),
                    coefficient=c * self._facts.scales.get((t.name, i), 1.0),
                    block_l2sq=s.block_l2sq if s else None,
                    block_max_abs=s.block_max_abs if s else None,
                    block_nonzero=s.block_nonzero if s else None,
                    bundle_nbytes=view.nbytes if view.low_rank or not view.stored else None,
                )
            )
        return rows

    def _merged_tasks(
        self, parts: Sequence[_Part], candidates: Candidates, chosen: Choice
    ) -> dict[str, TensorTask]:
        slices = iter(candidates.row_slices())
        out = {}
        for part in parts:
            t = part.recipe
            experts = []
            for i, entry in enumerate(t.inputs if part.operator != "copy" else ()):
                cut = next(slices)
                taken = chosen[cut]
                view = self._view(entry.model, entry.tensor)
                experts.append(
                    ExpertInput(
                        position=entry.position,
                        view=view,
                        sha256=self._sha256(entry.model, entry.tensor),
                        params=part.model_params[i],
                        covered=self._ranges(taken | candidates.zero[cut], view.numel),
                        read=self._ranges(taken, view.numel),
                        trim=self._facts.trims.get((t.name, i)),
                        outliers=self._facts.outliers.get((t.name, i)),
                        scale=self._facts.scales.get((t.name, i), 1.0),
                    )
                )
            out[t.name] = TensorTask(
                name=t.name,
                shape=part.shape,
                out_dtype=self._out_dtype(self._like(t)),
                operator=part.operator,
                params=part.params if experts else (),
                seed=self._recipe.seed,
                base=self._base(t),
                experts=tuple(experts),
                facts=part.facts if experts else (),
                reason=part.reason,
            )
        return out

    def _response(self, part: _Part) -> Response:
        return self._methods[part.operator].response(part.params)

    def _copy(self, t: TensorRecipe) -> TensorTask:
        """A tensor that nothing is merged into: the base's, or the first model's."""
        like = self._like(t)
        first = t.base or t.inputs[0]
        source = (first.model, first.tensor)
        return TensorTask(
            name=t.name,
            shape=like.shape,
            out_dtype=self._out_dtype(like),
            operator="copy",
            params=(),
            seed=self._recipe.seed,
            base=BaseInput(self._view(*source), self._sha256(*source)),
            experts=(),
        )

    def _base(self, t: TensorRecipe) -> BaseInput | None:
        if t.base is None:
            return None
        return BaseInput(
            self._view(t.base.model, t.base.tensor), self._sha256(t.base.model, t.base.tensor)
        )

    def _ranges(self, taken: Choice, numel: int) -> tuple[Range, ...]:
        return coalesce(self._grid.range_of(int(b), numel) for b in np.flatnonzero(taken))

    def _estimates(
        self,
        parts: Sequence[_Part],
        candidates: Candidates,
        chosen: Choice,
        budget_bytes: int | None,
        total: int,
    ) -> Estimates:
        reach, negative = [], []
        responses: set[Response] = set()
        for part in parts:
            if part.operator == "copy":
                continue
            responses.add(self._response(part))
            params = dict(part.params)
            normalised = bool(params.get("normalize")) or self._response(part) == "mean"
            below = any(float(dict(p).get("weight", 1.0)) < 0 for p in part.model_params)
            for i in range(len(part.recipe.inputs)):
                scale = float(params.get("lambda", 1.0)) * _rescale(params, part.model_params[i])
                scale = abs(scale * self._facts.scales.get((part.recipe.name, i), 1.0))
                reach.append(scale if normalised else np.nan)
                negative.append(normalised and below)
        if "mean" in responses:
            responses.add("vote")
        worst: tuple[Response, ...] = ("unbounded", "vote", "additive")
        response = next((r for r in worst if r in responses), worst[-1])
        bound = error_bound(
            candidates, chosen, response, np.array(reach), np.array(negative, np.bool_)
        )
        known = all(r.block_l2sq is not None for r in candidates.rows)
        units = np.bincount(candidates.unit, chosen, candidates.n_units) > 0
        return Estimates(
            budget_bytes=budget_bytes,
            strategy=self._recipe.strategy,
            block_elems=candidates.grid.block_elems,
            expert_bytes_total=total,
            expert_bytes_planned=int(candidates.nbytes[chosen].sum()),
            blocks_total=candidates.n_units,
            blocks_bought=int(units.sum()),
            blocks_zero=int(candidates.unit_zero.sum()),
            error_bound=bound.value,
            bound_note=bound.note,
            update_norm=update_norm(candidates) if known else None,
        )


def _rescale(params: Mapping[str, Any], model_params: Params) -> float:
    """What the papers' variants divide a kept element by: at least its probability."""
    given = dict(model_params)
    density = float(given.get("density", 1.0))
    if params.get("variant") != "paper" or not params.get("rescale") or not 0 < density < 1:
        return 1.0
    return 1.0 / (density - float(given.get("epsilon", 0.0)))
