"""The merged output tensors of a recipe as the planner sees them: rows, samples and sensitivities.

Joins the recipe with the catalog's facts. What is read is decided in `strategies`, what it leads
to in `samples` and `bounds`; `plan_builder` makes the tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.operator import Choosing
from mergepipe_pipeline.domain.output import is_kept, is_merged, stored_like
from mergepipe_pipeline.domain.plan import ExpertInput, TensorTask, TrimRule
from mergepipe_pipeline.domain.recipe import Params, Recipe, TensorRecipe
from mergepipe_pipeline.domain.stats import SAMPLE_WIDTH, ExpertStats, Kept, TensorStats
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.planner.bounds import Sensitivity
from mergepipe_pipeline.planner.candidates import Row, lay_out
from mergepipe_pipeline.planner.lengths import Trimmed
from mergepipe_pipeline.planner.levels import LevelTable
from mergepipe_pipeline.planner.packed_rows import Packs, row_levels
from mergepipe_pipeline.planner.samples import Samples, Simulate
from mergepipe_pipeline.planner.strategies import PACKS

#: A sum of weights that is nearer to one is one: 0.7 + 0.2 + 0.1.
_ROUNDING = 1e-6

#: (output tensor, input number).
Place = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """Facts of whole tensors, by place or by output tensor, filled in kind by kind.

    `chosen`: the operator, its parameters per tensor and per model, and the reason, where the
    recipe's method leaves the choice open. `l1s` are norms of deltas whose scale is a guess. `kept`
    is what `trims` and `outliers` keep (absent: all).
    """

    measured: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    chosen: Mapping[str, Choosing] = field(default_factory=dict)
    trims: dict[Place, TrimRule] = field(default_factory=dict)
    outliers: dict[Place, TrimRule] = field(default_factory=dict)
    scales: dict[Place, float] = field(default_factory=dict)
    l1s: dict[Place, float] = field(default_factory=dict)
    kept: dict[Place, Kept] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One merged output tensor; operator `copy` keeps the base's."""

    recipe: TensorRecipe
    operator: str
    params: Params
    model_params: tuple[Params, ...]
    facts: tuple[float, ...]
    reason: str
    shape: tuple[int, ...]


class Parts:
    """The parts of one recipe; `stats`, on `grid`, are by (expert's model number, base's)."""

    def __init__(
        self,
        recipe: Recipe,
        models: Sequence[Model],
        stats: Mapping[tuple[int, int], ExpertStats],
        facts: TensorFacts,
        grid: BlockGrid,
    ) -> None:
        self._recipe, self._models = recipe, models
        self._stats, self._facts, self._grid = stats, facts, grid
        self.all = [self._part(t) for t in recipe.tensors if is_merged(t, models)]

    def table(self, packs: Packs | None = None) -> LevelTable:
        """Lay out all that could be read; with `packs` on their grid of whole chunks."""
        grid = packs.grid if packs else self._grid
        rows: list[Row] = []
        for number, part in enumerate(self.all):
            own = self._rows(number, part)
            rows += [self._packed(part, i, r, packs) for i, r in enumerate(own)] if packs else own
        return LevelTable(lay_out(rows, grid))

    def samples(self, table: LevelTable) -> dict[int, Samples]:
        """Return the samples of each part whose statistics are all known, by number."""
        by_tensor = {}
        for group in table.candidates.groups():
            part = self.all[group.tensor]
            stats = [self._stats_of(part.recipe, i) for i in range(len(group.rows))]
            present = [s.block_sample for s in stats if s is not None]
            if len(present) == len(stats):
                grids = table.candidates.grid, self._grid
                by_tensor[group.tensor] = Samples(group.rows, present, *grids, self._simulate(part))
        return by_tensor

    def sensitivities(self) -> dict[int, Sensitivity]:
        """How each part responds to what is left out, by number."""
        return {n: self._sensitivity(p) for n, p in enumerate(self.all) if p.operator != "copy"}

    def add_to_base(self) -> bool:
        """Whether the merge is the base plus what deltas add.

        Sums of values are so where weights sum to one: else a multiple of the base is left.
        """
        for part in self.all:
            method = OPERATORS[part.operator] if part.operator != "copy" else None
            # What is measured settles factors for directions, which all but sum to one.
            if method is None or method.schema.base != "none" or part.facts:
                continue
            total = sum(method.coefficients(part.params, part.model_params, part.facts))
            if part.recipe.base is not None and abs(total - 1) > _ROUNDING:
                return False
        return True

    def _part(self, t: TensorRecipe) -> Part:
        own = Choosing(self._recipe.method, t.params, tuple(i.params for i in t.inputs), "")
        chosen = self._facts.chosen.get(t.name)
        choosing = chosen or own
        if t.base is not None and is_kept(self._recipe.budget, t.name):
            choosing = chosen = Choosing("copy", (), (), "kept by the recipe")
        return Part(
            recipe=t,
            operator=choosing.operator,
            params=choosing.params,
            model_params=choosing.model_params,
            facts=() if chosen else self._facts.measured.get(t.name, ()),
            reason=choosing.reason,
            shape=stored_like(t, self._models).shape,
        )

    def _stats_of(self, t: TensorRecipe, number: int) -> TensorStats | None:
        """Statistics of an input, None where it has no base to differ from."""
        entry = t.inputs[number]
        if t.base is None:
            return None
        stats = self._stats.get((entry.model, t.base.model))
        return stats.by_pair.get((entry.tensor, t.base.tensor)) if stats else None

    def _rows(self, number: int, part: Part) -> list[Row]:
        """A row per input of a part, in order; none of what is copied."""
        t = part.recipe
        if part.operator == "copy":
            return []
        operator = OPERATORS[part.operator]
        coefficients = operator.coefficients(part.params, part.model_params, part.facts)
        is_sum = self._is_sum(part)
        rows = []
        for i, (entry, c) in enumerate(zip(t.inputs, coefficients, strict=True)):
            view = self._models[entry.model].views[entry.tensor]
            s, place = self._stats_of(t, i), (t.name, i)
            kept, keep = self._kept(part, i, s)
            rows.append(
                Row(
                    tensor=number,
                    position=entry.position,
                    name=f"{t.name}#{entry.position}",
                    numel=view.numel,
                    itemsize=itemsize(view.dtype),
                    coefficient=c * self._facts.scales.get(place, 1.0),
                    block_l2sq=s.block_l2sq if s else None,
                    block_nonzero=s.block_nonzero if s else None,
                    block_sq_norm=kept.block_sq_norm if kept else None,
                    kept_sq_norm=kept.most if kept else np.inf,
                    keep=keep,
                    is_sum=is_sum,
                    bundle_nbytes=view.nbytes if view.low_rank or not view.stored else None,
                    coded=view if any(p.codes for p in view.stored) else None,
                    is_vector=len(view.shape) < 2,
                )
            )
        return rows

    def _is_sum(self, part: Part) -> bool:
        """Whether a part is a sum of deltas, or of what a random drop leaves of them."""
        method = OPERATORS[part.operator]
        return method.response(part.params) == "additive" and method.schema.fact in ("none", "drop")

    def _packed(self, part: Part, i: int, row: Row, packs: Packs) -> Row:
        """The row of input `i` on the packs' grid, with what its pack has, if it has one."""
        t = part.recipe
        row = _coarsened(row, packs.grid.block_elems // self._grid.block_elems)
        if t.base is None:
            return row
        of_pair = packs.rows.get((t.inputs[i].model, t.base.model), {})
        packed = of_pair.get((t.inputs[i].tensor, t.base.tensor))
        if packed is None:
            return row
        trim, method = self._facts.trims.get((t.name, i)), OPERATORS[part.operator]
        approximates = self._recipe.strategy == PACKS or not method.schema.approximates_by_request
        trimmed = self._trimmed(part, i, row, trim) if trim else None
        levels = row_levels(packed, trim, approximates=approximates, trimmed=trimmed)
        return replace(row, levels=levels)

    def _trimmed(self, part: Part, i: int, row: Row, trim: TrimRule) -> Trimmed | None:
        """What a trim before a vote keeps; sums of what is trimmed are best as they are read."""
        is_vote = OPERATORS[part.operator].response(part.params) == "vote"
        if not is_vote or (part.recipe.name, i) in self._facts.outliers:
            return None
        if row.block_l2sq is None or row.block_sq_norm is None:
            return None
        return Trimmed(trim.threshold, float(row.block_sq_norm.sum()), row.block_l2sq, row.numel)

    def _kept(self, part: Part, i: int, s: TensorStats | None) -> tuple[Kept | None, float]:
        """Return the part of a delta that is kept (None: all), and a drop's probability."""
        fact = OPERATORS[part.operator].schema.fact
        density = min(1.0, max(0.0, float(dict(part.model_params[i]).get("density", 1.0))))
        if s is None or fact == "none" or density == 1:
            return None, 1.0
        if density == 0 or fact in ("drop", "ranked"):
            return Kept(density * s.block_l2sq, s.l2sq if density else 0.0), density
        return self._facts.kept.get((part.recipe.name, i)), 1.0

    def _simulate(self, part: Part) -> Simulate | None:
        """How samples of a part are merged; None for sums, and where only whole rows can be.

        Elements of a sample rank about as those of its row do.
        """
        schema = OPERATORS[part.operator].schema
        if self._is_sum(part) or not (schema.scope == "element" or schema.fact == "ranked"):
            return None

        @cache
        def simulation(n: int) -> Simulate:
            # Imports compiled kernels or torch, which planning a sum of deltas can do without.
            from mergepipe_pipeline.planner.simulate import simulation_of

            return simulation_of(self._sampled_task(part, n))

        return lambda deltas: simulation(deltas.shape[1])(deltas)

    def _sampled_task(self, part: Part, n: int) -> TensorTask:
        """A task like the part's over `n` sampled elements; each block's samples are a row."""
        experts = tuple(
            ExpertInput(
                position=entry.position,
                view=self._models[entry.model].views[entry.tensor],
                digest="",
                params=part.model_params[i],
                covered=(),
                read=(),
                trim=_thinned(self._facts.trims.get((part.recipe.name, i)), n, numel),
                outliers=_thinned(self._facts.outliers.get((part.recipe.name, i)), n, numel),
                scale=self._facts.scales.get((part.recipe.name, i), 1.0),
            )
            for i, entry in enumerate(part.recipe.inputs)
            for numel in (self._models[entry.model].views[entry.tensor].numel,)
        )
        return TensorTask(
            name=part.recipe.name,
            shape=(SAMPLE_WIDTH,),
            out_dtype="F32",
            operator=part.operator,
            params=part.params,
            seed=self._recipe.seed,
            base=None,
            experts=experts,
            facts=part.facts,
        )

    def _sensitivity(self, part: Part) -> Sensitivity:
        response = OPERATORS[part.operator].response(part.params)
        params = dict(part.params)
        normalised = response == "mean" or (response == "vote" and bool(params.get("normalize")))
        is_negative = any(float(dict(p).get("weight", 1.0)) < 0 for p in part.model_params)
        reach = np.full(len(part.recipe.inputs), np.nan)
        for i in range(len(reach)) if normalised else ():
            scale = float(params.get("lambda", 1.0)) * _rescale(params, part.model_params[i])
            reach[i] = abs(scale * self._facts.scales.get((part.recipe.name, i), 1.0))
        return Sensitivity(response, reach, normalised and is_negative)


def _coarsened(row: Row, blocks: int) -> Row:
    """A row whose blocks are `blocks` of its own, the last perhaps fewer."""
    if row.block_l2sq is None or row.block_nonzero is None or blocks == 1:
        return row
    starts = np.arange(0, len(row.block_l2sq), blocks)
    sq_norm = row.block_sq_norm
    return replace(
        row,
        block_l2sq=np.add.reduceat(row.block_l2sq, starts),
        block_nonzero=np.add.reduceat(row.block_nonzero, starts),
        block_sq_norm=None if sq_norm is None else np.add.reduceat(sq_norm, starts),
    )


def _thinned(rule: TrimRule | None, n: int, numel: int) -> TrimRule | None:
    """A rule for `n` samples in order of a tensor's `numel` elements: as many of its ties."""
    return rule and replace(rule, tie_stop_elem=rule.tie_stop_elem * n // max(1, numel))


def _rescale(params: Mapping[str, Any], model_params: Params) -> float:
    """The factor of a kept element in the papers' variants: one over its probability at most."""
    by_name = dict(model_params)
    density = float(by_name.get("density", 1.0))
    if params.get("variant") != "paper" or not params.get("rescale") or not 0 < density < 1:
        return 1.0
    return 1.0 / (density - float(by_name.get("epsilon", 0.0)))
