"""The verb `check`: every problem of a recipe and its full cost, from headers alone.

Also the first step of planning: what it returns is what a plan is made from. No weight is read.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.dtypes import FLOATING, itemsize
from mergepipe_pipeline.errors import IncompatibleCheckpointsError, MergePipeError, RecipeError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.pipeline.analyze import grid_for
from mergepipe_pipeline.pipeline.register import look
from mergepipe_pipeline.recipe.budget import parse_budget
from mergepipe_pipeline.recipe.load import RawRecipe, parse_recipe, resolve_recipe
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.layers import is_optional, layer_count, layer_name
from mergepipe_pipeline.spec.recipe import Recipe
from mergepipe_pipeline.warehouse import Warehouse

SCHEMAS = {name: operator.schema for name, operator in OPERATORS.items()}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a merge will read and write, in bytes, before the catalog's help.

    `analysis_bytes` is read once to learn the statistics that are not known yet; `budget_bytes`
    None is no limit. Expert bytes read will be at most min(budget, total).
    """

    expert_bytes_total: int
    budget_bytes: int | None
    base_bytes: int
    output_bytes: int
    analysis_bytes: int
    free_bytes: int
    layers: int
    tensors: int


@dataclass(frozen=True)
class Checked:
    """A recipe that can run: resolved, with its checkpoints, block grid, cost and warnings."""

    recipe: Recipe
    base: Checkpoint | None
    experts: tuple[Checkpoint, ...]
    grid: BlockGrid
    cost: Cost

    @property
    def template(self) -> Checkpoint:
        """The checkpoint that gives the output its tensors, config and tokenizer."""
        return self.base or self.experts[0]


def load_recipe(path: str | Path) -> RawRecipe:
    """Parse a recipe file. Raises RecipeError with all problems, also for a lost file."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            "A recipe cannot be read",
            where=str(path),
            expected="a YAML file in UTF-8",
            found=str(error),
            next_step="check the path",
        ) from error
    return parse(text, name=file.stem, where=str(path))


def parse(text: str, *, name: str, where: str) -> RawRecipe:
    """Parse recipe text with the operators there are. Raises RecipeError, BudgetError."""
    return parse_recipe(text, name=name, where=where, methods=SCHEMAS)


def check(
    home: Warehouse,
    raw: RawRecipe,
    *,
    relative_to: Path | None = None,
    budget: str | None = None,
    strategy: str | None = None,
    block_elems: int | None = None,
) -> Checked:
    """Everything that can be said from headers alone; writes nothing.

    Raises the one problem as itself, several as a RecipeError that lists them all.
    """
    problems: list[MergePipeError] = []
    taken: dict[str, str] = {}
    base = _open(home, raw.base_model, relative_to, taken, problems) if raw.base_model else None
    experts = [_open(home, m, relative_to, taken, problems) for m in raw.models]
    opened = [e for e in experts if e is not None]
    if problems:
        raise _all(problems, raw)
    template = base or opened[0]
    if raw.method not in SCHEMAS or SCHEMAS[raw.method].space == "delta" or base is not None:
        problems += _misfits(template, opened)
    else:
        problems += _misfits(template, opened[1:])
    presence = [frozenset(e.by_name) for e in opened]
    try:
        recipe = resolve_recipe(raw, template.tensors, presence, SCHEMAS)
        _validate(recipe, template)
    except MergePipeError as error:
        problems.append(error)
    if problems:
        raise _all(problems, raw)
    if budget is not None:
        recipe = replace(recipe, budget=parse_budget(budget, "--budget"))
    if strategy is not None:
        recipe = replace(recipe, strategy=strategy)
    grid = grid_for(template, block_elems or raw.block_elems)
    return Checked(
        recipe, base, tuple(opened), grid, _cost(home, recipe, base, opened, template, grid)
    )


def _open(
    home: Warehouse,
    text: str,
    relative_to: Path | None,
    taken: dict[str, str],
    problems: list[MergePipeError],
) -> Checkpoint | None:
    try:
        checkpoint = look(home, text, relative_to, taken)
    except MergePipeError as error:
        problems.append(error)
        return None
    taken[checkpoint.name] = checkpoint.root
    return checkpoint


def _misfits(template: Checkpoint, experts: Sequence[Checkpoint]) -> list[MergePipeError]:
    """One error per expert whose tensors do not fit the template's."""
    found: list[MergePipeError] = []
    for expert in experts:
        shapes = [
            t
            for t in expert.tensors
            if t.name in template.by_name and template.by_name[t.name].shape != t.shape
        ]
        missing = [
            t.name
            for t in template.tensors
            if t.name not in expert.by_name and not is_optional(t.name)
        ]
        extra = [t.name for t in expert.tensors if t.name not in template.by_name]
        if shapes:
            t = shapes[0]
            found.append(
                IncompatibleCheckpointsError(
                    f"{len(shapes)} tensors of an expert have another shape",
                    where=f"{expert.name}, tensor {t.name}",
                    expected=f"{list(template.by_name[t.name].shape)} as in {template.name}",
                    found=str(list(t.shape)),
                    next_step="use experts of this base, or another base_model",
                )
            )
        for names, word in ((missing, "lacks"), (extra, "has, beyond the base,")):
            if names:
                found.append(
                    IncompatibleCheckpointsError(
                        f"An expert {word} {len(names)} tensors",
                        where=f"{expert.name}, tensor {names[0]}",
                        expected=f"the tensors of {template.name}",
                        found=", ".join(names[:3]) + (", …" if len(names) > 3 else ""),
                        next_step="use experts of this base, or another base_model",
                    )
                )
    return found


def _validate(recipe: Recipe, template: Checkpoint) -> None:
    """Raise OperatorError if the method's parameters cannot work for some tensor."""
    operator = OPERATORS[recipe.method]
    for t in recipe.tensors:
        entry = template.by_name[t.name]
        if t.models and entry.dtype in FLOATING:
            operator.validate(t.name, entry.numel, t.params, t.model_params)


def _all(problems: Sequence[MergePipeError], raw: RawRecipe) -> MergePipeError:
    if len(problems) == 1:
        return problems[0]
    flat = tuple(
        line
        for p in problems
        for line in (p.problems if isinstance(p, RecipeError) and p.problems else (str(p),))
    )
    return RecipeError(
        "A recipe has several problems",
        where=raw.where,
        problems=flat,
        next_step="mend them all; nothing was read or written",
    )


def _cost(
    home: Warehouse,
    recipe: Recipe,
    base: Checkpoint | None,
    experts: Sequence[Checkpoint],
    template: Checkpoint,
    grid: BlockGrid,
) -> Cost:
    total = output = 0
    for t in recipe.tensors:
        entry = template.by_name[t.name]
        floating = entry.dtype in FLOATING
        out = (recipe.out_dtype or recipe.dtype or entry.dtype) if floating else entry.dtype
        output += entry.numel * itemsize(out)
        if floating:
            total += sum(experts[m].by_name[t.name].nbytes for m in t.models)
    return Cost(
        expert_bytes_total=total,
        budget_bytes=recipe.budget.resolve(total),
        base_bytes=base.nbytes if base and SCHEMAS[recipe.method].space == "delta" else 0,
        output_bytes=output,
        analysis_bytes=_unknown_bytes(home, base, experts, grid),
        free_bytes=shutil.disk_usage(home.root).free,
        layers=len(
            {
                layer_name(t.name, layer_count(x.name for x in recipe.tensors))
                for t in recipe.tensors
            }
        ),
        tensors=len(recipe.tensors),
    )


def _unknown_bytes(
    home: Warehouse, base: Checkpoint | None, experts: Sequence[Checkpoint], grid: BlockGrid
) -> int:
    catalog = Catalog(home.catalog)
    nbytes = 0
    for e in experts:
        if base is None:
            nbytes += 0 if catalog.digests(e.checkpoint_id) is not None else e.nbytes
        elif not catalog.has_stats(base.checkpoint_id, e.checkpoint_id, grid.block_elems):
            nbytes += e.nbytes + base.nbytes
    return nbytes
