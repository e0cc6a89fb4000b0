"""A resolved recipe without some of its models: what it gives when an expert takes no part.

The others keep their positions, which address random numbers, so that nothing else changes with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.spec.model import Model
from mergepipe_pipeline.spec.recipe import BaseTensor, Recipe, TensorRecipe, TokenizerRecipe


def without(
    recipe: Recipe, models: Sequence[Model], names: Collection[str]
) -> tuple[Recipe, list[Model]]:
    """The recipe and its models without the models that have a checkpoint of such a name.

    A tensor without any remaining input is the base's. Raises RecipeError where the recipe needs
    one of them: as a base, for the tokenizer, or because its method merges no fewer models.
    """
    gone = {n for n, m in enumerate(models) if any(c.name in names for c in m.checkpoints)}
    if not gone:
        return recipe, list(models)
    remaining = [n for n in range(len(models)) if n not in gone]
    numbers = {n: i for i, n in enumerate(remaining)}
    omitted = ", ".join(models[n].name for n in sorted(gone))
    if recipe.base in gone or any(t.base and t.base.model in gone for t in recipe.tensors):
        raise _needed(recipe, omitted, "another base model, since others are merged into it")
    tokenizer = recipe.tokenizer
    if tokenizer is not None:
        if _models_of(tokenizer) & gone:
            raise _needed(recipe, omitted, "another model for the tokenizer")
        tokenizer = _renumbered(tokenizer, numbers)
    fewest = OPERATORS[recipe.method].schema.experts[0]
    tensors = tuple(_without(t, gone, numbers) for t in recipe.tensors)
    for before, after in zip(recipe.tensors, tensors, strict=True):
        kept = len(after.inputs)
        if kept < len(before.inputs) and kept < (fewest if kept or after.base is None else 0):
            raise _needed(recipe, omitted, f"at least {fewest} models besides the base")
    made = replace(
        recipe,
        models=tuple(recipe.models[n] for n in remaining),
        base=None if recipe.base is None else numbers[recipe.base],
        tensors=tensors,
        tokenizer=tokenizer,
    )
    return made, [models[n] for n in remaining]


def _without(t: TensorRecipe, gone: Collection[int], numbers: Mapping[int, int]) -> TensorRecipe:
    inputs = tuple(replace(i, model=numbers[i.model]) for i in t.inputs if i.model not in gone)
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


def _needed(recipe: Recipe, omitted: str, expected: str) -> RecipeError:
    return RecipeError(
        "A model cannot be left out of this recipe",
        where=recipe.name,
        expected=expected,
        found=f"none without {omitted}",
        next_step="keep the model, or take another version of it",
    )
