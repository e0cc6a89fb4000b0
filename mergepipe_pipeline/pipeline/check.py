"""The verb `check`: every problem of a recipe and its full cost, from headers alone.

Also the first step of planning: what it returns is what a plan is made from. No weight is read.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.dtypes import FLOATING, itemsize
from mergepipe_pipeline.errors import MergePipeError, RecipeError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.pipeline.analyze import grid_for, missing_pairs
from mergepipe_pipeline.pipeline.models import open_models
from mergepipe_pipeline.pipeline.side import side_of, template_of
from mergepipe_pipeline.pipeline.tokens import Reindexer, build_for
from mergepipe_pipeline.pipeline.vocabulary import fit_rows
from mergepipe_pipeline.recipe.budget import parse_budget
from mergepipe_pipeline.recipe.load import RawRecipe, parse_recipes, resolve_recipe
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.spec.layers import layer_count, layer_name
from mergepipe_pipeline.spec.model import Model
from mergepipe_pipeline.spec.recipe import Recipe, TensorRecipe
from mergepipe_pipeline.spec.view import TensorView
from mergepipe_pipeline.tokenizer.build import TokenizerBuild
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
    """A recipe that can run: resolved, with its models, block grid, cost and warnings.

    `models` are in the order of `recipe.models`, fitted to each other; `originals` are the same
    before the output's tokenizer was applied. `before` are the stages before it.
    """

    recipe: Recipe
    models: tuple[Model, ...]
    grid: BlockGrid
    cost: Cost
    originals: tuple[Model, ...]
    tokenizer: TokenizerBuild | None = None
    before: tuple[Checked, ...] = ()

    @property
    def base(self) -> Model | None:
        """The recipe's base model."""
        return None if self.recipe.base is None else self.models[self.recipe.base]

    @property
    def experts(self) -> tuple[Model, ...]:
        """The models that contribute to some tensor, in recipe order."""
        used = {i.model for t in self.recipe.tensors for i in t.inputs}
        return tuple(m for n, m in enumerate(self.models) if n in used)


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
    """Parse recipe text with the operators there are; earlier stages are in `before`.

    Raises RecipeError, BudgetError.
    """
    *before, final = parse_recipes(text, name=name, where=where, methods=SCHEMAS)
    return replace(final, before=tuple(before), text=text) if before else final


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

    Earlier stages are checked, too, and stand for their results. Raises the one problem as itself,
    several as a RecipeError that lists them all.
    """
    before: list[Checked] = []
    pending: dict[str, Checkpoint] = {}
    for stage in raw.before:
        checked = check_stage(
            home,
            stage,
            pending,
            relative_to=relative_to,
            budget=budget,
            strategy=strategy,
            block_elems=block_elems,
        )
        before.append(checked)
        files = checked.tokenizer.files if checked.tokenizer else None
        pending[stage.stage or stage.name] = foreseen(checked.recipe, checked.models, files)
    final = check_stage(
        home,
        raw,
        pending,
        relative_to=relative_to,
        budget=budget,
        strategy=strategy,
        block_elems=block_elems,
    )
    return replace(final, before=tuple(before))


def check_stage(
    home: Warehouse,
    raw: RawRecipe,
    pending: Mapping[str, Checkpoint],
    *,
    relative_to: Path | None = None,
    budget: str | None = None,
    strategy: str | None = None,
    block_elems: int | None = None,
) -> Checked:
    """As `check`, for one stage; `pending` are the results of earlier ones by name."""
    recipe, models = resolve_stage(home, raw, pending, relative_to)
    originals = models
    problems: list[MergePipeError] = []
    tokenizer, warnings = None, recipe.warnings
    try:
        tokenizer = build_for(recipe, models)
        if tokenizer is not None:
            models = Reindexer(None, recipe, models, tokenizer).models()
            warnings += tokenizer.warnings
        models, cropped = fit_rows(recipe, models, problems)
        side_of(recipe, models, tokenizer.files if tokenizer else None)
        warnings += cropped
        if not problems:
            _validate(recipe, models)
    except MergePipeError as error:
        problems.append(error)
    if problems:
        raise _all(problems, raw)
    recipe = replace(recipe, warnings=warnings)
    if budget is not None:
        recipe = replace(recipe, budget=parse_budget(budget, "--budget"))
    if strategy is not None:
        recipe = replace(recipe, strategy=strategy)
    template = models[template_of(recipe, models)]
    grid = grid_for(template, block_elems or raw.block_elems)
    cost = _cost(home, recipe, models, grid)
    return Checked(recipe, tuple(models), grid, cost, tuple(originals), tokenizer)


def resolve_stage(
    home: Warehouse,
    raw: RawRecipe,
    pending: Mapping[str, Checkpoint],
    relative_to: Path | None = None,
) -> tuple[Recipe, list[Model]]:
    """The recipe's output tensors with their inputs, and its models; opens what `pending` lacks.

    Raises as `check` does, for what the models' structure alone can tell.
    """
    problems: list[MergePipeError] = []
    models = open_models(home, raw.references, raw.base, relative_to, pending, problems)
    if problems:
        raise _all(problems, raw)
    partial = [m.is_partial for m in models]
    recipe = resolve_recipe(raw, [m.views for m in models], SCHEMAS, partial)
    return recipe, [_completed(m, n, recipe, models) for n, m in enumerate(models)]


def output_view(t: TensorRecipe, models: Sequence[Model]) -> TensorView:
    """The view that gives an output tensor its shape and stored dtype: the base's, or the first."""
    if t.base is not None:
        return models[t.base.model].views[t.base.tensor]
    return models[t.inputs[0].model].views[t.inputs[0].tensor]


def out_dtype(recipe: Recipe, like: TensorView) -> str:
    """The dtype (safetensors code) in which an output tensor is written."""
    if like.dtype not in FLOATING:
        return like.dtype
    return recipe.out_dtype or recipe.dtype or like.dtype


def foreseen(
    recipe: Recipe, models: Sequence[Model], tokenizer_files: Mapping[str, bytes] | None = None
) -> Checkpoint:
    """What a stage's result will look like: its tensors, without files.

    `tokenizer_files` None: those of its template.
    """
    entries = []
    for t in recipe.tensors:
        like = output_view(t, models)
        entries.append(TensorEntry(t.name, out_dtype(recipe, like), like.shape, "", 0))
    template = models[template_of(recipe, models)].checkpoint
    files = template.tokenizer_files if tokenizer_files is None else tokenizer_files
    return Checkpoint(
        recipe.name, template.root, (), tuple(entries), template.config, tokenizer_files=files
    )


def _completed(model: Model, number: int, recipe: Recipe, models: Sequence[Model]) -> Model:
    """A partial model with views of the tensors in which it takes part as the base itself."""
    views = dict(model.views)
    for t in recipe.tensors:
        for i in t.inputs:
            if i.model == number and i.tensor not in views and t.base is not None:
                base = models[t.base.model].views[t.base.tensor]
                views[i.tensor] = TensorView(i.tensor, base.dtype, base.shape)
    return replace(model, views=views)


def _validate(recipe: Recipe, models: Sequence[Model]) -> None:
    """Raise OperatorError if the method's parameters cannot work for some tensor."""
    operator = OPERATORS[recipe.method]
    for t in recipe.tensors:
        if t.inputs:
            like = output_view(t, models)
            if like.dtype in FLOATING and like.numel:
                operator.validate(t.name, like.shape, t.params, [i.params for i in t.inputs])


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


def _cost(home: Warehouse, recipe: Recipe, models: Sequence[Model], grid: BlockGrid) -> Cost:
    total = output = base = 0
    names = [t.name for t in recipe.tensors]
    pairs: dict[tuple[int, int], list[tuple[str, str]]] = {}
    reads_base = SCHEMAS[recipe.method].base != "none"
    for t in recipe.tensors:
        like = output_view(t, models)
        floating = like.dtype in FLOATING
        output += like.numel * itemsize(out_dtype(recipe, like))
        base += like.nbytes if (t.base and reads_base) or not t.inputs or not floating else 0
        for i in t.inputs if floating else ():
            total += models[i.model].views[i.tensor].nbytes
            if t.base is not None:
                pairs.setdefault((i.model, t.base.model), []).append((i.tensor, t.base.tensor))
    return Cost(
        expert_bytes_total=total,
        budget_bytes=recipe.budget.resolve(total),
        base_bytes=base,
        output_bytes=output,
        analysis_bytes=_unknown_bytes(home, models, pairs, grid),
        free_bytes=shutil.disk_usage(home.root).free,
        layers=len({layer_name(n, layer_count(names)) for n in names}),
        tensors=len(names),
    )


def _unknown_bytes(
    home: Warehouse,
    models: Sequence[Model],
    pairs: Mapping[tuple[int, int], Sequence[tuple[str, str]]],
    grid: BlockGrid,
) -> int:
    catalog = Catalog(home.catalog)
    nbytes = 0
    paired = {expert for expert, _ in pairs}
    for (expert, base), wanted in pairs.items():
        for mine, theirs in missing_pairs(home, models[expert], models[base], wanted, grid):
            view = models[expert].views[mine]
            below = models[base].views[theirs].nbytes if view.stands_alone else 0
            nbytes += view.nbytes + below
    for number, model in enumerate(models):
        if number not in paired and not any(base == number for _, base in pairs):
            unknown = [c for c in model.checkpoints if catalog.digests(c.checkpoint_id) is None]
            nbytes += sum(c.nbytes for c in unknown)
    return nbytes
