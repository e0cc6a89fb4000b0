"""Resolves a recipe against its checkpoints: all its problems, or all that a plan is made from.

From headers alone: no weight is read, nothing is written.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.layers import is_head
from mergepipe_pipeline.domain.model import Model, grid_for
from mergepipe_pipeline.domain.model_config import ties_head
from mergepipe_pipeline.domain.output import is_merged, stored_like, stored_tensors
from mergepipe_pipeline.domain.plan import SideFiles
from mergepipe_pipeline.domain.recipe import ModelRef, Recipe
from mergepipe_pipeline.domain.request import AS_WRITTEN, Request, RequestedModel
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.errors import CheckpointError, MergePipeError, RecipeError
from mergepipe_pipeline.facts.quarantine import quarantine_of
from mergepipe_pipeline.facts.side_file_digests import refuse_changed_files
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.recipe.budget import parse_budget, with_amount
from mergepipe_pipeline.recipe.model_tensors import ModelTable
from mergepipe_pipeline.recipe.parse import ParsedRecipe, resolve_recipe
from mergepipe_pipeline.recipe.schema import known_strategy
from mergepipe_pipeline.resolution.alike import compute_alike
from mergepipe_pipeline.resolution.cost import Cost, estimate
from mergepipe_pipeline.resolution.fit import misfits, without
from mergepipe_pipeline.resolution.fp8_output import coded_names
from mergepipe_pipeline.resolution.layer_config import depth_of
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.resolution.model_files import (
    beside_warnings,
    side_of,
    template_of,
    with_ids,
    without_tokenizer,
)
from mergepipe_pipeline.resolution.open_models import open_models, tied_updates
from mergepipe_pipeline.resolution.plain_numbers import (
    refuse_coded_arithmetic,
    refuse_coded_models,
)
from mergepipe_pipeline.resolution.recipe_text import placed_in, several
from mergepipe_pipeline.resolution.token_rows import Reindexer, build_for, with_own_matrices
from mergepipe_pipeline.resolution.vocabulary import fit_rows
from mergepipe_pipeline.snapshots.model_folder import config_json
from mergepipe_pipeline.tokenizer.build import TokenizerBuild
from mergepipe_pipeline.tokenizer.special_ids import GENERATION
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe that can run: resolved, with its models, block grid, cost and warnings.

    `models` are in the order of `recipe.models`, fitted to each other; `originals` are the same
    before the output's tokenizer was applied. `side` stands beside the result's weights; `before`
    are the stages before it. `request` says what overruled the recipe.
    """

    recipe: Recipe
    models: tuple[Model, ...]
    grid: BlockGrid
    cost: Cost
    originals: tuple[Model, ...]
    side: SideFiles
    tokenizer: TokenizerBuild | None = None
    before: tuple[ResolvedRecipe, ...] = ()
    request: Request = AS_WRITTEN

    @property
    def base(self) -> Model | None:
        """The recipe's base model."""
        return None if self.recipe.base is None else self.models[self.recipe.base]

    @property
    def experts(self) -> tuple[Model, ...]:
        """The models that contribute to some tensor, in recipe order."""
        used = self.recipe.contributing
        return tuple(m for n, m in enumerate(self.models) if n in used)


class Planning(TypedDict, total=False):
    """The options of a recipe's planning, in place of the recipe's own or the default.

    `relative_to` is the folder that relative paths start from; `checkpoints` (by name) are not
    opened anew. The others are those of a `Request`, over those of the `request` that is repeated.
    """

    relative_to: Path | None
    checkpoints: Mapping[str, Checkpoint] | None
    request: Request
    budget: str | None
    strategy: str | None
    block_elems: int | None
    no_packs: bool
    left_out: tuple[str, ...]
    copies_tokenizer: bool
    truncates: bool


def resolve(
    warehouse: Warehouse, parsed: ParsedRecipe, **planning: Unpack[Planning]
) -> ResolvedRecipe:
    """Everything that can be said from headers alone; writes nothing.

    Earlier stages are checked, too, and stand for their results; of a stage whose earlier one
    fails, only the models are looked at. Raises the one problem as itself,
    several as a RecipeError that lists them all.
    """
    done: list[ResolvedRecipe] = []
    pending: dict[str, Checkpoint] = {}
    problems: list[MergePipeError] = []
    failed: set[str] = set()
    for stage in (*parsed.before, parsed):
        name = stage.stage or stage.name
        if failed & set(stage.stages_used):
            places = Places(warehouse, planning.get("relative_to"), pending)
            problems += _lost_models(places, stage, failed)
            failed.add(name)
            continue
        try:
            resolved = resolve_stage(warehouse, stage, pending, **planning)
        except MergePipeError as error:
            problems.append(error)
            failed.add(name)
            continue
        done.append(resolved)
        pending[name] = foreseen(resolved.recipe, resolved.models, resolved.side)
    if problems:
        raise several(problems, parsed)
    *before, final = done
    return replace(final, before=tuple(before))


def resolve_stage(
    warehouse: Warehouse,
    parsed: ParsedRecipe,
    pending: Mapping[str, Checkpoint],
    **planning: Unpack[Planning],
) -> ResolvedRecipe:
    """Resolve one stage; `pending` are the results of earlier ones by name."""
    request = _request(parsed, planning)
    known = {**(planning.get("checkpoints") or {}), **pending}
    places = Places(warehouse, planning.get("relative_to"), known)
    recipe, models = open_stage(places, parsed)
    recipe, models = with_own_matrices(*without(recipe, models, request.left_out))
    inputs = {c.name: c for m in models for c in m.checkpoints if c.name not in pending}
    decided = [quarantine_of(warehouse, name, c) for name, c in inputs.items()]
    if recipe.tokenizer is not None or recipe.chat_template is not None:
        for checkpoint in {c.root: c for m in models for c in m.checkpoints}.values():
            if checkpoint.tokenizer_files is None:  # of a stage that is yet to be merged
                refuse_changed_files(warehouse, checkpoint)
    fitted = _fit(parsed, request, recipe, models)
    if request.no_packs:
        _refuse_away(models, pending)
    template = fitted.models[fitted.side.template]
    warnings = [*recipe.warnings, *fitted.warnings, *tied_updates(models, recipe.base)]
    warnings += [*_no_config(template), *compute_alike(recipe, models, fitted.side.template)]
    warnings += [w for m in models for c in m.checkpoints for w in c.ignored_warnings]
    warnings += [
        f"{place} leaves config.json: nothing in the result is quantised"
        for place, value in fitted.side.config
        if value is None and not recipe.coded
    ]
    warnings += [
        f"the stage {name!r} hides what else is called so: the model of that name or path"
        for name in parsed.stages_used
        if places.has(name)
    ]
    # They are merged all the same for who asks for it by hand; a standing recipe waits.
    warnings += [str(decision) for decision in decided if decision is not None]
    recipe = _as_asked(replace(recipe, warnings=tuple(warnings)), request)
    grid = grid_for(template, request.block_elems or parsed.block_elems)
    return ResolvedRecipe(
        recipe=recipe,
        models=fitted.models,
        grid=grid,
        cost=estimate(warehouse, recipe, fitted.models, grid),
        originals=tuple(models),
        side=fitted.side,
        tokenizer=fitted.tokenizer,
        request=request,
    )


def _request(parsed: ParsedRecipe, planning: Planning) -> Request:
    """The request of a caller, with how the recipe was read; its models are yet to be found."""
    asked: dict[str, Any] = {k: v for k, v in planning.items() if k in Request.__slots__}
    return replace(
        planning.get("request", AS_WRITTEN),
        **asked,
        models=(),
        packs=(),
        selected=parsed.all_selected,
        lenient=parsed.lenient,
    )


@dataclass(frozen=True)
class _Fit:
    """Models whose rows follow the output's vocabulary, and what stands beside the result."""

    models: tuple[Model, ...]
    side: SideFiles
    tokenizer: TokenizerBuild | None
    warnings: tuple[str, ...]


def _fit(parsed: ParsedRecipe, request: Request, recipe: Recipe, models: Sequence[Model]) -> _Fit:
    """Give the models the rows of the output's vocabulary. Raises what does not fit together."""
    problems: list[MergePipeError] = []
    warnings: tuple[str, ...] = ()
    try:
        tokenizer = build_for(recipe, models)
        if tokenizer is not None:
            models = Reindexer(recipe, models, tokenizer).models()
            warnings += tokenizer.warnings
        models, cropped = fit_rows(recipe, models, problems, truncate=request.truncates)
        made, copies = tokenizer.files if tokenizer else None, request.copies_tokenizer
        side = side_of(recipe, models, made, copies_tokenizer=copies)
        side, told = with_ids(side, recipe, models, tokenizer)
        if not copies:
            kept = (file for file in side.files or () if file[0] == GENERATION)
            side = replace(side, files=tuple(kept))
        warnings += (*told, *beside_warnings(recipe, models, side))
        warnings += without_tokenizer(side, models) if copies else ()
        if not problems:
            _refuse_lost_head(recipe, models[side.template])
            _validate(recipe, models)
    except MergePipeError as error:
        problems.append(error)
    if problems:
        raise several(problems, parsed)
    return _Fit(tuple(models), side, tokenizer, (*warnings, *cropped))


def _as_asked(recipe: Recipe, request: Request) -> Recipe:
    """The recipe with the budget and strategy of the call, where it names them."""
    if request.budget is not None:
        amount = parse_budget(request.budget, "--budget")
        recipe = replace(recipe, budget=with_amount(recipe.budget, amount))
    if request.strategy is not None:
        recipe = replace(recipe, strategy=known_strategy(request.strategy, "--strategy"))
    return recipe


def open_stage(places: Places, parsed: ParsedRecipe) -> tuple[Recipe, list[Model]]:
    """The recipe's output tensors with their inputs, and its models.

    Codes that are only copied stay as they are stored; where that cannot be, all codes are decoded.
    Raises as `resolve` does, for what the models' structure alone can tell.
    """
    try:
        return _open_stage(places, parsed, decoded=False)
    except MergePipeError:
        if not _has_decodable(places, parsed.references):
            raise
    return _open_stage(places, parsed, decoded=True)


def _has_decodable(places: Places, references: Sequence[ModelRef]) -> bool:
    for ref in references:
        with suppress(MergePipeError):  # which the stage's own opening has said
            if any(c.form and c.form.schemes for c in places.of(ref)):
                return True
    return False


def _open_stage(
    places: Places, parsed: ParsedRecipe, *, decoded: bool
) -> tuple[Recipe, list[Model]]:
    problems: list[MergePipeError] = []
    models = open_models(
        places,
        parsed.references,
        parsed.base,
        problems,
        partial(placed_in, parsed),
        parsed.not_aligned,
        decoded=decoded,
    )
    if problems:
        raise several(problems, parsed)
    refuse_coded_models(parsed, models)
    problems += misfits(parsed, models)
    if problems:
        raise several(problems, parsed)
    tables = [
        ModelTable(ref, m.views, m.is_partial, depth_of(m), ties_head(m.stated))
        for ref, m in zip(parsed.references, models, strict=True)
    ]
    recipe = resolve_recipe(parsed, tables)
    models = [_completed(m, n, recipe, models) for n, m in enumerate(models)]
    refuse_coded_arithmetic(recipe, models)
    coded = coded_names(recipe, models, template_of(recipe, models))
    return replace(recipe, coded=coded), models


def foreseen(recipe: Recipe, models: Sequence[Model], side: SideFiles | None = None) -> Checkpoint:
    """The result of a stage as it will be: its tensors, config and tokenizer, without files.

    `side` None: config and tokenizer are its template's as they are.
    """
    entries = tuple(
        TensorEntry(name, dtype, shape, "", 0)
        for t in recipe.tensors
        for name, dtype, shape in stored_tensors(recipe, t, models)
    )
    template = models[template_of(recipe, models)].checkpoint
    config, files = template.config, template.tokenizer_files
    if side is not None and side.config and config is not None:
        config = config_json(config.encode(), None, side.config).decode()
    if side is not None and side.files is not None:
        files = {name: b64decode(text) for name, text in side.files}
    return Checkpoint(recipe.name, template.root, (), entries, config, tokenizer_files=files)


def _completed(model: Model, number: int, recipe: Recipe, models: Sequence[Model]) -> Model:
    """A partial model with views of the tensors in which it takes part as the base itself."""
    views = dict(model.views)
    for t in recipe.tensors:
        for i in t.inputs:
            if i.model == number and i.tensor not in views and t.base is not None:
                base = models[t.base.model].views[t.base.tensor]
                views[i.tensor] = TensorView(i.tensor, base.dtype, base.shape)
    return replace(model, views=views)


def _refuse_lost_head(recipe: Recipe, template: Model) -> None:
    """Raise RecipeError where the model that gives the config has a head, and the result none."""
    names = {t.name for t in recipe.tensors}
    lost = [n for n in template.views if is_head(n) and n not in names]
    if lost and not ties_head(template.stated):
        raise RecipeError(
            "The result lacks the head that its config is for",
            where=recipe.name,
            expected=f"{lost[0]}, as in {template.name}, which gives the config",
            found="a last slice of a model without it",
            next_step="take the last slice from a model of the same task as the first",
        )


def _validate(recipe: Recipe, models: Sequence[Model]) -> None:
    """Raise OperatorError if the method's parameters cannot work for some tensor."""
    operator = OPERATORS[recipe.method]
    for t in recipe.tensors:
        like = stored_like(t, models)
        if is_merged(t, models):
            operator.validate(t.name, like.shape, t.params, [i.params for i in t.inputs])


def _lost_models(
    places: Places, stage: ParsedRecipe, failed: Collection[str]
) -> list[MergePipeError]:
    """The problems with the models of a stage that waits for one that has failed."""
    problems: list[MergePipeError] = []
    refs = [r for r in stage.references if r.model not in failed]
    open_models(places, refs, None, problems, partial(placed_in, stage))
    return [problem for problem in problems if isinstance(problem, CheckpointError)]


def _refuse_away(models: Sequence[Model], pending: Mapping[str, Checkpoint]) -> None:
    """Raise CheckpointError for models but `pending` ones that only packs give the bytes of."""
    pending_roots = {c.root for c in pending.values()}
    checkpoints = (c for m in models for c in m.checkpoints)
    names = dict.fromkeys(
        c.name for c in checkpoints if c.is_offline and c.root not in pending_roots
    )
    if names:
        raise CheckpointError(
            "Files were moved to cold storage, and a merge without packs needs them",
            where=", ".join(names),
            expected="the files, where they were",
            found="packs alone: `pack --replace` moved the files away",
            next_step="leave out --no-packs, or run "
            + " and ".join(f"`mergepipe unpack {name}`" for name in names),
        )


def _no_config(template: Model) -> list[str]:
    if template.checkpoint.config is not None:
        return []
    return [
        f"{template.name} has no config.json, and the result takes it from there: no library will "
        "load the result before one is put beside its weights"
    ]


def requested(
    resolved: ResolvedRecipe, digests: Mapping[str, Mapping[str, str]], stages: Collection[str]
) -> Request:
    """The request of a checked recipe with its models, after those of the stages before it.

    `digests` are of tensors, by the ids of checkpoints; the results of `stages` are no inputs.
    """
    models_by_text = {m.text: m for m in resolved.request.models}
    for ref, model in zip(resolved.recipe.models, resolved.originals, strict=True):
        for text, c in zip(_texts(ref, len(model.checkpoints)), model.checkpoints, strict=True):
            if text not in stages:
                content = digest_json(dict(digests[c.checkpoint_id]))
                models_by_text[text] = RequestedModel(
                    text, c.name, c.root, c.checkpoint_id, content
                )
    return replace(resolved.request, models=tuple(models_by_text.values()))


def _texts(ref: ModelRef, count: int) -> Iterator[str]:
    """The texts that name each checkpoint of a model, as `Places.pending` has it."""
    if count == 1:
        yield ref.text
        return
    for text, revision in ((ref.model, ref.revision), (ref.lora, ref.lora_revision)):
        yield f"{text}@{revision}" if revision else str(text)
