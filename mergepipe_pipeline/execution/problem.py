"""The planning problem of a recipe, or of a plan made earlier, and its solution; reads no weight.

For the verbs that tell and change nothing: `curve` and `explain`. A plan is asked about from the
catalog alone; its checkpoints need not be there any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from mergepipe_pipeline.execution.planning import resolve_after_stages
from mergepipe_pipeline.facts.gather import PlanInputs, gather
from mergepipe_pipeline.planner.candidates import Choice
from mergepipe_pipeline.planner.selection import BlockSelection, PlanningProblem, select_blocks
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import Planning, resolve_stage
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.layers import layer_count, layer_name
from mergepipe_pipeline.spec.plan import MergePlan, Source
from mergepipe_pipeline.spec.recipe import Recipe
from mergepipe_pipeline.storage.open_checkpoint import open_checkpoint
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True)
class SolvedProblem:
    """A recipe with its planning problem, and the blocks selected.

    `experts` are the models' names by position; those in `read` had to be analysed first.
    """

    recipe: Recipe
    experts: tuple[str, ...]
    problem: PlanningProblem
    selection: BlockSelection
    read: tuple[str, ...]

    @property
    def choice(self) -> Choice:
        """The selected candidates."""
        return self.selection.choice

    @property
    def layers(self) -> list[str]:
        """The layer of each of the problem's tensors."""
        count = layer_count(t.name for t in self.recipe.tensors)
        return [layer_name(name, count) for name in self.problem.tensors]


def solve_recipe(
    warehouse: Warehouse,
    raw: ParsedRecipe,
    *,
    progress: Progress | None = None,
    for_parts: bool = False,
    **planning: Unpack[Planning],
) -> SolvedProblem:
    """A recipe's planning problem and its solution; raises what planning raises.

    As for a plan, earlier stages are merged and unknown experts analysed. `for_parts` is needed to
    ask about other budgets than the recipe's.
    """
    resolved, results = resolve_after_stages(warehouse, raw, progress=progress, **planning)
    inputs = gather(warehouse, resolved, progress, unnamed=results, for_parts=for_parts)
    recipe, problem = resolved.recipe, inputs.builder().problem()
    selection = select_blocks(problem, recipe.budget, recipe.strategy)
    return SolvedProblem(recipe, _experts(inputs), problem, selection, inputs.read)


def solve_plan(
    warehouse: Warehouse, plan: MergePlan, progress: Progress | None = None
) -> SolvedProblem:
    """The planning problem of a plan, and the plan's own selection.

    Raises what checking its recipe raises; reads weights only if the catalog lost what it knew.
    """
    raw = parse(plan.recipe_text, name=plan.recipe_name, where=f"plan {plan.plan_id[:16]}")
    known = _checkpoints(warehouse, plan, raw)
    e = plan.estimates
    budget = "none" if e.budget_bytes is None else str(e.budget_bytes)
    resolved = resolve_stage(
        warehouse,
        raw,
        known,
        budget=budget,
        strategy=e.strategy,
        block_elems=e.block_elems,
        no_packs=plan.request.no_packs,
    )
    inputs = gather(warehouse, resolved, progress, unnamed=known)
    problem = inputs.builder().problem()
    selection = BlockSelection(e.strategy, e.ranking or e.strategy, _choice(problem, plan))
    return SolvedProblem(resolved.recipe, _experts(inputs), problem, selection, inputs.read)


def _experts(inputs: PlanInputs) -> tuple[str, ...]:
    """Models' names by the positions of the recipe's inputs."""
    found = {
        i.position: inputs.models[i.model].name for t in inputs.recipe.tensors for i in t.inputs
    }
    return tuple(found.get(n, "") for n in range(max(found, default=-1) + 1))


def _checkpoints(warehouse: Warehouse, plan: MergePlan, raw: ParsedRecipe) -> dict[str, Checkpoint]:
    """By the text that names them in the recipe, the checkpoints that the plan reads."""
    made = str(warehouse.token_rows)
    sources = (_checkpoint(warehouse, s) for s in plan.sources if not s.root.startswith(made))
    found: dict[str, Checkpoint] = {}
    on_base: list[str] = []
    for ref in raw.references:
        first = next(sources)
        if ref.lora is None:
            found[ref.text] = first
        elif first.kind == "adapter":
            # An adapter on the recipe's base is a source by itself.
            found[ref.lora] = first
            on_base.append(ref.model)
        else:
            found[ref.model], found[ref.lora] = first, next(sources)
    if on_base and raw.base is not None:
        base = found[raw.references[raw.base].text]
        found = dict.fromkeys(on_base, base) | found
    return found


def _checkpoint(warehouse: Warehouse, source: Source) -> Checkpoint:
    known = warehouse.catalog.checkpoint(source.checkpoint_id, source.name, source.root)
    return known or open_checkpoint(source.root, source.name)


def _choice(problem: PlanningProblem, plan: MergePlan) -> Choice:
    """The plan's reads as candidates."""
    c = problem.candidates
    tasks = {task.name: task for layer in plan.layers for task in layer.tasks}
    choice = np.zeros(len(c.row), np.bool_)
    for group in c.groups():
        experts = tasks[problem.tensors[group.tensor]].experts
        for cut, expert in zip(group.slices, experts, strict=True):
            for start, stop in _blocks(expert.read, c.grid.block_elems):
                choice[cut.start + start : cut.start + stop] = True
    return choice & ~c.zero


def _blocks(read: tuple[tuple[int, int], ...], block_elems: int) -> Iterator[tuple[int, int]]:
    """Ranges of blocks that ranges of elements stand for."""
    for start, stop in read:
        yield start // block_elems, -(-stop // block_elems)
