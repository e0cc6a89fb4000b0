"""Turns a recipe, catalog facts and a choice of blocks into a `MergePlan`.

The last step of planning. It decides what is covered (selected blocks, and blocks whose delta
is known to be zero, which cost nothing) and what is read (selected blocks only); see `domain.plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.domain.model import Model, view_digest
from mergepipe_pipeline.domain.output import out_dtype, stored_like
from mergepipe_pipeline.domain.plan import (
    BaseInput,
    Estimates,
    ExpertInput,
    LayerTask,
    MergePlan,
    SideFiles,
    Source,
    TensorTask,
)
from mergepipe_pipeline.domain.recipe import Recipe, TensorRecipe
from mergepipe_pipeline.domain.stats import ExpertStats
from mergepipe_pipeline.domain.view import TensorView, moved
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.planner.candidates import Candidates
from mergepipe_pipeline.planner.constraints import Names
from mergepipe_pipeline.planner.levels import Levels, packed_input
from mergepipe_pipeline.planner.packed_rows import NOTHING, ORIGINAL, Packs
from mergepipe_pipeline.planner.parts import Parts, TensorFacts
from mergepipe_pipeline.planner.selection import PlanningProblem, Selection, estimates, select
from mergepipe_pipeline.planner.strategies import PACKS

#: Why the norm of an update is not known where there are deltas.
_SCALED = "weights that do not sum to one scale the base, too"


class PlanBuilder:
    """Builds the plan of one recipe.

    `digests` are of tensors, by the ids of checkpoints; a planning problem needs none. `stats` are
    by (expert's model number, base's).
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        models: Sequence[Model],
        digests: Mapping[str, Mapping[str, str]],
        stats: Mapping[tuple[int, int], ExpertStats],
        facts: TensorFacts,
        grid: BlockGrid,
        side: SideFiles,
        packs: Packs | None = None,
    ) -> None:
        self.recipe, self._models, self._facts = recipe, models, facts
        self._packs = packs
        self._grid, self._side, self.digests = grid, side, digests
        self._parts = Parts(recipe, models, stats, facts, grid)
        counts = [len(model.checkpoints) for model in models]
        self._first_source = [sum(counts[:n]) for n in range(len(counts))]

    def problem(self, *, with_packs: bool) -> PlanningProblem:
        """Lay out what can be read, of packs too or of stored elements only."""
        packs = self._packs if with_packs else None
        table = self._parts.table(packs)
        return PlanningProblem(
            table=table,
            sensitivities=self._parts.sensitivities(),
            samples=self._parts.samples(table),
            tensors=[part.recipe.name for part in self._parts.all],
            experts=self._experts(),
            block_elems=self._grid.block_elems,
            has_packs=packs is not None,
        )

    def problems(self, selection: Selection) -> tuple[PlanningProblem, ...]:
        """The problem of a selection, and that of packs or of stored elements, where both exist."""
        own = selection.problem
        if self._packs is None:
            return (own,)
        other = self.problem(with_packs=not own.has_packs)
        return (own, other)

    def selection(self) -> Selection:
        """Select what the recipe's budget covers. Raises BudgetError as `select` does."""
        strategy = self.recipe.strategy
        with_packs = self._packs is not None and strategy in (None, PACKS)
        named = None if strategy == PACKS else strategy
        return select(self.problem(with_packs=with_packs), self.recipe.budget, named)

    def _experts(self) -> list[Names]:
        """Return the names of each position of the recipe."""
        places = {(e.position, e.model): None for t in self.recipe.tensors for e in t.inputs}
        names = {position: self.recipe.models[model].names for position, model in places}
        return [names.get(n, ()) for n in range(max(names, default=-1) + 1)]

    def build(self) -> MergePlan:
        """Return the plan under the recipe's budget and strategy; raises as `select`."""
        recipe = self.recipe
        selection = self.selection()
        candidates, levels = selection.problem.candidates, selection.levels
        promised = estimates(selection, recipe.budget)
        if promised.update_norm is not None and not self._parts.add_to_base():
            promised = replace(promised, update_norm=None, update_note=_SCALED)
        merged = self._merged_tasks(candidates, levels)
        tasks: dict[str, list[TensorTask]] = {}
        n_layers = layer_count(t.name for t in recipe.tensors)
        for t in recipe.tensors:
            task = merged.get(t.name) or self._copy(t)
            tasks.setdefault(layer_name(t.name, n_layers), []).append(task)
        sources = [
            Source(c.name, c.root, c.checkpoint_id, c.stamp)
            for model in self._models
            for c in model.checkpoints
        ]
        return MergePlan(
            recipe_name=recipe.name,
            recipe_text=recipe.text,
            method=recipe.method,
            sources=tuple(sources),
            roles=tuple(
                "base" if number == recipe.base else "expert"
                for number, model in enumerate(self._models)
                for _ in model.checkpoints
            ),
            layers=tuple(LayerTask(n, tuple(tasks[n])) for n in sorted(tasks, key=layer_order)),
            side=replace(self._side, template=self._first_source[self._side.template]),
            ref=recipe.ref,
            estimates=promised,
            warnings=(*recipe.warnings, *self._warnings(candidates, promised)),
            packs=self._packs.sources if self._packs and promised.strategy == PACKS else (),
        )

    def _warnings(self, c: Candidates, promised: Estimates) -> Iterator[str]:
        """Warnings: experts that add nothing, a budget that is too small for any block, and packs
        that do not exist.
        """
        alive = np.bincount(c.expert, ~c.zero)
        there = np.bincount(c.expert, minlength=len(alive))
        # Among values, a model that equals the base draws the others to it.
        is_update = OPERATORS[self.recipe.method].schema.space == "delta"
        for number, names in enumerate(self._experts() if is_update else ()):
            if number < len(alive) and there[number] and not alive[number]:
                yield f"{names[-1]} equals the base in all that is merged: it adds nothing"
        if promised.expert_bytes_planned == 0 and alive.any():
            yield "the budget is too small for any block of any expert: the result is the base"
        if self.recipe.strategy == PACKS and promised.strategy != PACKS:
            yield (
                f"no expert has a pack, so that strategy {promised.strategy} stands for packs; "
                "`mergepipe pack` makes them"
            )

    def _view(self, model: int, tensor: str) -> TensorView:
        return moved(self._models[model].views[tensor], self._first_source[model])

    def _digest(self, model: int, tensor: str) -> str:
        of = self._models[model]
        digests = [self.digests[c.checkpoint_id] for c in of.checkpoints]
        return view_digest(of.views[tensor], digests)

    def _merged_tasks(self, candidates: Candidates, levels: Levels) -> dict[str, TensorTask]:
        rows = zip(
            candidates.rows,
            candidates.row_slices(),
            candidates.ranges((levels != NOTHING) | candidates.zero),
            candidates.ranges(levels == ORIGINAL),
            strict=True,
        )
        elems = candidates.grid.block_elems
        out = {}
        for part in self._parts.all:
            t = part.recipe
            experts = []
            for i, entry in enumerate(t.inputs if part.operator != "copy" else ()):
                row, cut, covered, read = next(rows)
                experts.append(
                    ExpertInput(
                        position=entry.position,
                        view=self._view(entry.model, entry.tensor),
                        digest=self._digest(entry.model, entry.tensor),
                        params=part.model_params[i],
                        covered=covered,
                        read=read,
                        trim=self._facts.trims.get((t.name, i)),
                        outliers=self._facts.outliers.get((t.name, i)),
                        scale=self._facts.scales.get((t.name, i), 1.0),
                        l1=self._facts.l1s.get((t.name, i)),
                        packed=packed_input(row, levels[cut], elems),
                    )
                )
            out[t.name] = TensorTask(
                name=t.name,
                shape=part.shape,
                out_dtype=out_dtype(self.recipe, t, self._models),
                operator=part.operator,
                params=part.params if experts else (),
                seed=self.recipe.seed,
                base=self._base(t),
                experts=tuple(experts),
                facts=part.facts if experts else (),
                reason=part.reason,
                is_coded=t.name in self.recipe.coded,
            )
        return out

    def _copy(self, t: TensorRecipe) -> TensorTask:
        """A tensor that nothing is merged into: the base's, or the first model's."""
        like = stored_like(t, self._models)
        first = t.base or t.inputs[0]
        source = (first.model, first.tensor)
        return TensorTask(
            name=t.name,
            shape=like.shape,
            out_dtype=out_dtype(self.recipe, t, self._models),
            operator="copy",
            params=(),
            seed=self.recipe.seed,
            base=BaseInput(self._view(*source), self._digest(*source)),
            experts=(),
            is_coded=t.name in self.recipe.coded,
        )

    def _base(self, t: TensorRecipe) -> BaseInput | None:
        if t.base is None:
            return None
        return BaseInput(
            self._view(t.base.model, t.base.tensor), self._digest(t.base.model, t.base.tensor)
        )
