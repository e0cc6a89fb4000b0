"""Whether models have a place in the one that leads a merge: by names, whatever the layer's number.

A model whose tensors all have other names is not one that equals the base.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from mergepipe_pipeline.domain.layers import is_optional, layer_index, with_layer_index
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.recipe import BaseTensor, Recipe, TensorRecipe, TokenizerRecipe
from mergepipe_pipeline.errors import IncompatibleCheckpointsError, MergePipeError, RecipeError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.recipe.outputs import disjoint, module_of
from mergepipe_pipeline.recipe.structure import Module, ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import placed_in


def misfits(parsed: ParsedRecipe, models: Sequence[Model]) -> Iterator[MergePipeError]:
    """An error for each model that a recipe merges and that has no place in the leading one."""
    leads = {m.name or "default": _lead(m, parsed.base, models) for m in parsed.modules}
    parts = {name: module_of(name, models[lead].views) for name, lead in leads.items()}
    belongs = disjoint({name: part for name, part in parts.items() if part is not None})
    for module in parsed.modules:
        name = module.name or "default"
        for number in dict.fromkeys(_merged(module)) if name in belongs else ():
            try:
                refuse_unplaced(models[number], models[leads[name]], belongs[name])
            except MergePipeError as error:
                yield placed_in(parsed, error, parsed.references[number])


def _merged(module: Module) -> Iterator[int]:
    for part in module.slices:
        yield from (entry.model for entry in part.entries)
        if part.base is not None:
            yield part.base


def _lead(module: Module, base: int | None, models: Sequence[Model]) -> int:
    """The recipe's base, else the first whole model of a module: others have names as it has."""
    merged = list(_merged(module))
    whole = (number for number in merged if not models[number].is_partial)
    return next(whole, merged[0]) if base is None else base


def refuse_unplaced(
    model: Model, lead: Model, belongs: Callable[[str], bool] = lambda name: True
) -> None:
    """Raise IncompatibleCheckpointsError for a model of whose tensors too few have a place.

    That is none of its layers', or under half of all that `belongs`, biases, heads and buffers
    apart. What is stored as codes has other names by right, and errors of its own.
    """
    if any(c.form is not None for m in (model, lead) for c in m.checkpoints):
        return
    names, led = _needed(model, belongs), _needed(lead, belongs)
    kinds = {with_layer_index(n, 0) for n in led}
    placed = [n for n in names if with_layer_index(n, 0) in kinds]
    in_layers = [n for n in names if layer_index(n) is not None]
    is_lost = bool(in_layers) and not any(layer_index(n) is not None for n in placed)
    if not is_lost and 2 * len(placed) >= len(names):
        return
    own = {with_layer_index(n, 0) for n in placed}
    holds_lead = not is_lost and 2 * len([n for n in led if with_layer_index(n, 0) in own]) > len(
        led
    )
    raise IncompatibleCheckpointsError(
        "A model's tensors have no place in the model that it is merged into",
        where=f"{model.name}, {model.checkpoint.root}",
        expected=f"names as in {lead.name}: {_first(led, set(own))}",
        found=f"{_first(names, kinds)}; of {len(names)} tensors {len(placed)} have a place",
        next_step=f"make {model.name} the base, and merge {lead.name} into it"
        if holds_lead
        else "save the model with save_pretrained of transformers, or get it in that format: other "
        "formats (Mistral's, GGUF's, FSDP's flat parameters) have other tensors",
    )


def _needed(model: Model, belongs: Callable[[str], bool]) -> list[str]:
    return [n for n in model.views if belongs(n) and not is_optional(n)]


def _first(names: Sequence[str], placed: set[str]) -> str:
    """The first names that the other side lacks, those in layers first."""
    lacked = [n for n in names if with_layer_index(n, 0) not in placed]
    return ", ".join(sorted(lacked or names, key=lambda n: layer_index(n) is None)[:2])


def without(
    recipe: Recipe, models: Sequence[Model], names: Collection[str]
) -> tuple[Recipe, list[Model]]:
    """The recipe and its models without the models that have a checkpoint of such a name.

    A tensor without any remaining input is the base's. Raises RecipeError where the recipe needs
    one of them: as a base, for the tokenizer, or because its method merges no fewer models.
    """
    removed = {n for n, m in enumerate(models) if any(c.name in names for c in m.checkpoints)}
    if not removed:
        return recipe, list(models)
    remaining = [n for n in range(len(models)) if n not in removed]
    numbers = {n: i for i, n in enumerate(remaining)}
    omitted = ", ".join(models[n].name for n in sorted(removed))
    if recipe.base in removed or any(t.base and t.base.model in removed for t in recipe.tensors):
        raise _requires(recipe, omitted, "another base model, since others are merged into it")
    tokenizer = recipe.tokenizer
    if tokenizer is not None:
        if _models_of(tokenizer) & removed:
            raise _requires(recipe, omitted, "another model for the tokenizer")
        tokenizer = _renumbered(tokenizer, numbers)
    fewest = OPERATORS[recipe.method].schema.experts[0]
    tensors = tuple(_without(t, removed, numbers) for t in recipe.tensors)
    for before, after in zip(recipe.tensors, tensors, strict=True):
        n_inputs = len(after.inputs)
        if n_inputs < len(before.inputs) and n_inputs < (
            fewest if n_inputs or after.base is None else 0
        ):
            raise _requires(recipe, omitted, f"at least {fewest} models besides the base")
    reduced = replace(
        recipe,
        models=tuple(recipe.models[n] for n in remaining),
        base=None if recipe.base is None else numbers[recipe.base],
        tensors=tensors,
        tokenizer=tokenizer,
    )
    return reduced, [models[n] for n in remaining]


def _without(t: TensorRecipe, removed: Collection[int], numbers: Mapping[int, int]) -> TensorRecipe:
    inputs = tuple(replace(i, model=numbers[i.model]) for i in t.inputs if i.model not in removed)
    base = t.base and BaseTensor(numbers[t.base.model], t.base.tensor)
    return replace(t, base=base, inputs=inputs)


def _models_of(tokenizer: TokenizerRecipe) -> set[int]:
    numbers = {rule.model for rule in tokenizer.tokens if rule.model is not None}
    return numbers if tokenizer.source == "union" else {*numbers, tokenizer.source}


def _renumbered(tokenizer: TokenizerRecipe, numbers: Mapping[int, int]) -> TokenizerRecipe:
    rules = tuple(
        rule if rule.model is None else replace(rule, model=numbers[rule.model])
        for rule in tokenizer.tokens
    )
    source = tokenizer.source
    return replace(
        tokenizer, tokens=rules, source="union" if source == "union" else numbers[source]
    )


def _requires(recipe: Recipe, omitted: str, expected: str) -> RecipeError:
    return RecipeError(
        "A model cannot be left out of this recipe",
        where=recipe.name,
        expected=expected,
        found=f"none without {omitted}",
        next_step="keep the model, or take another version of it",
    )
