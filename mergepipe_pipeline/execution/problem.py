"""The planning problem of a recipe, or of a plan made earlier, and its solution; reads no weight.

For the verb `curve`. A plan is asked about from the catalog alone;
its checkpoints need not be there any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import numpy as np

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.contents.offline import present_root
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.pack import TIERS
from mergepipe_pipeline.domain.plan import ExpertInput, MergePlan, Source
from mergepipe_pipeline.domain.recipe import Recipe
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.execution.egress import egress_of_recipe
from mergepipe_pipeline.execution.planning import resolve_after_stages
from mergepipe_pipeline.facts.gather import gather
from mergepipe_pipeline.planner.bounds import Bound
from mergepipe_pipeline.planner.candidates import Candidates
from mergepipe_pipeline.planner.levels import Levels
from mergepipe_pipeline.planner.packed_rows import NOTHING, ORIGINAL
from mergepipe_pipeline.planner.selection import PlanningProblem, Selection
from mergepipe_pipeline.planner.strategies import PACKS
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse_plan
from mergepipe_pipeline.resolution.resolve import Planning, resolve_stage
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.remote.egress import Egress


@dataclass(frozen=True)
class SolvedProblem:
    """A recipe with its planning problems, and what was selected for the first of them.

    Where experts have packs, one of two `problems` reads them and one does not. Experts in `read`
    had to be analysed first. `egress` is what a merge of a recipe fetches from addresses.
    """

    recipe: Recipe
    problems: tuple[PlanningProblem, ...]
    selection: Selection
    read: tuple[str, ...]
    egress: tuple[Egress, ...] = ()

    @property
    def bound(self) -> Bound:
        """The bound of what was selected."""
        return self.selection.problem.bound(self.selection.levels)


def solve_recipe(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    *,
    progress: Progress | None = None,
    for_parts: bool = False,
    **planning: Unpack[Planning],
) -> SolvedProblem:
    """A recipe's planning problem and its solution; raises what planning raises.

    As for a plan, earlier stages are merged and unknown experts analysed. `for_parts` is needed to
    ask about other budgets than the recipe's.
    """
    resolved, results = resolve_after_stages(warehouse, parsed, progress=progress, **planning)
    inputs = gather(warehouse, resolved, progress, unnamed=results, for_parts=for_parts)
    builder = inputs.builder()
    selection = builder.selection()
    problems, egress = builder.problems(selection), egress_of_recipe(warehouse, resolved)
    return SolvedProblem(resolved.recipe, problems, selection, inputs.read, egress)


def solve_plan(warehouse: Warehouse, plan: MergePlan) -> SolvedProblem:
    """The planning problem of a plan, and the plan's own selection.

    Raises what checking its recipe raises, NotFoundError for a plan over packs that are gone; reads
    weights only if the catalog lost what it knew.
    """
    parsed = parse_plan(plan)
    checkpoints = _checkpoints(warehouse, plan, parsed)
    e = plan.estimates
    budget = "none" if e.budget_bytes is None else str(e.budget_bytes)
    resolved = resolve_stage(
        warehouse,
        parsed,
        checkpoints,
        budget=budget,
        strategy=e.strategy,
        block_elems=e.block_elems,
        no_packs=plan.request.no_packs,
    )
    inputs = gather(warehouse, resolved, unnamed=checkpoints)
    if e.strategy == PACKS and not inputs.packs:
        raise _packs_gone(plan)
    builder = inputs.builder()
    problem = builder.problem(with_packs=e.strategy == PACKS)
    selection = Selection(problem, e.strategy, _levels(problem.candidates, problem.tensors, plan))
    problems = builder.problems(selection)
    return SolvedProblem(resolved.recipe, problems, selection, inputs.read)


def _checkpoints(
    warehouse: Warehouse, plan: MergePlan, parsed: ParsedRecipe
) -> dict[str, Checkpoint]:
    """By the text that names them in the recipe, the checkpoints that the plan reads."""
    token_rows = str(warehouse.token_rows)
    sources = (_checkpoint(warehouse, s) for s in plan.sources if not s.root.startswith(token_rows))
    by_text: dict[str, Checkpoint] = {}
    on_base: list[str] = []
    for ref in parsed.references:
        first = next(sources)
        if ref.lora is None:
            by_text[ref.text] = first
        elif first.kind == "adapter":
            # An adapter on the recipe's base is a source by itself.
            by_text[ref.lora] = first
            on_base.append(ref.model)
        else:
            by_text[ref.model], by_text[ref.lora] = first, next(sources)
    if on_base and parsed.base is not None:
        base = by_text[parsed.references[parsed.base].text]
        by_text = dict.fromkeys(on_base, base) | by_text
    return by_text


def _checkpoint(warehouse: Warehouse, source: Source) -> Checkpoint:
    root = present_root(warehouse, source.checkpoint_id, source.root)
    recorded = warehouse.catalog.checkpoint(source.checkpoint_id, source.name, root)
    return recorded or open_checkpoint(root, source.name)


def _levels(c: Candidates, tensors: Sequence[str], plan: MergePlan) -> Levels:
    """What the plan reads of each candidate."""
    tasks = {task.name: task for layer in plan.layers for task in layer.tasks}
    levels = np.zeros(len(c.row), np.int8)
    for group in c.groups():
        experts = tasks[tensors[group.tensor]].experts
        for cut, expert in zip(group.slices, experts, strict=True):
            for start, stop, level in _read(expert):
                first, last = start // c.grid.block_elems, -(-stop // c.grid.block_elems)
                levels[cut.start + first : cut.start + last] = level
    levels[c.zero] = NOTHING
    return levels


def _read(e: ExpertInput) -> Iterator[tuple[int, int, int]]:
    """Ranges of elements with the number of the level at which they are read."""
    for start, stop in e.read:
        yield start, stop, ORIGINAL
    for r in e.packed.ranges if e.packed else ():
        yield r.start_elem, r.stop_elem, 1 + TIERS.index(r.level)


def _packs_gone(plan: MergePlan) -> NotFoundError:
    return NotFoundError(
        "The packs that a plan reads are gone",
        where=f"plan {plan.plan_id[:16]}",
        expected=", ".join(p.pack_id[:16] for p in plan.packs),
        found="none of them",
        next_step="pack the experts again, or plan the recipe anew",
    )
