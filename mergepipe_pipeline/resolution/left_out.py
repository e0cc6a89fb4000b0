"""A resolved recipe without some of its models: what it gives when an expert takes no part.

The others keep their positions, which address random numbers, so that nothing else changes with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.recipe import BaseTensor, Recipe, TensorRecipe, TokenizerRecipe
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.operators import OPERATORS


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
        raise _needed(recipe, omitted, "another base model, since others are merged into it")
    tokenizer = recipe.tokenizer
    if tokenizer is not None:
        if _models_of(tokenizer) & removed:
            raise _needed(recipe, omitted, "another model for the tokenizer")
        tokenizer = _renumbered(tokenizer, numbers)
    fewest = OPERATORS[recipe.method].schema.experts[0]
    tensors = tuple(_without(t, removed, numbers) for t in recipe.tensors)
    for before, after in zip(recipe.tensors, tensors, strict=True):
        n_inputs = len(after.inputs)
        if n_inputs < len(before.inputs) and n_inputs < (
            fewest if n_inputs or after.base is None else 0
        ):
            raise _needed(recipe, omitted, f"at least {fewest} models besides the base")
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


def _needed(recipe: Recipe, omitted: str, expected: str) -> RecipeError:
    return RecipeError(
        "A model cannot be left out of this recipe",
        where=recipe.name,
        expected=expected,
        found=f"none without {omitted}",
        next_step="keep the model, or take another version of it",
    )
