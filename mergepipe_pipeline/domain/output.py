"""Decides what an output tensor is: computed or copied, of which shape and type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.codes import stored_as
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.recipe import Budget, Recipe, TensorRecipe
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import FLOATING, FP8_BLOCKS, itemsize, promoted


def is_computed(method: str, t: TensorRecipe) -> bool:
    """Whether there is arithmetic in a tensor, and so a rounding; passthrough only scales."""
    if method != "passthrough":
        return bool(t.inputs)
    return any(dict(i.params).get("scale", 1) != 1 for i in t.inputs)


def promoted_dtype(
    t: TensorRecipe, tables: Sequence[Mapping[str, TensorEntry | TensorView]]
) -> str:
    """The narrowest dtype that holds what the base and all inputs of a tensor store.

    `tables[i]` are the tensors of model number i by name. A tensor without floating-point numbers
    has the dtype of what it copies. Factors of a low-rank update do not count: the update is of
    the tensor it is added to, and has that one's dtype in PEFT and mergekit.
    """
    first = t.base or t.inputs[0]
    like = tables[first.model][first.tensor]
    entries = [tables[i.model].get(i.tensor) for i in t.inputs]
    stored = [_written(e) for e in entries if e and (isinstance(e, TensorEntry) or e.stored)]
    if t.base or not stored:
        stored.append(_written(like))
    return promoted(stored) if like.dtype in FLOATING else like.dtype


def _written(of: TensorEntry | TensorView) -> str:
    """The dtype that what is stored calls for.

    Decoded values are float32 where their scales are, but codes hold fewer bits than bfloat16.
    """
    is_decoded = isinstance(of, TensorView) and any(p.codes for p in of.stored)
    return "BF16" if is_decoded and of.dtype == "F32" else of.dtype


def stored_like(t: TensorRecipe, models: Sequence[Model]) -> TensorView:
    """The view that gives an output tensor its shape: the base's, or the first."""
    if t.base is not None:
        return models[t.base.model].views[t.base.tensor]
    first = t.inputs[0]
    return models[first.model].views[first.tensor]


def is_merged(t: TensorRecipe, models: Sequence[Model]) -> bool:
    """Whether an output tensor is computed; others are taken as they are stored."""
    like = stored_like(t, models)
    return bool(t.inputs) and like.dtype in FLOATING and like.numel > 0


def out_dtype(recipe: Recipe, t: TensorRecipe, models: Sequence[Model]) -> str:
    """The dtype (safetensors code) in which an output tensor is written: decided here alone.

    Codes are made of float32.
    """
    like, recipe_dtype = stored_like(t, models), recipe.out_dtype or recipe.dtype
    if like.dtype not in FLOATING:
        return like.dtype
    if recipe_dtype == FP8_BLOCKS:
        return "F32" if t.name in recipe.coded else "BF16"
    if t.base is not None and is_kept(recipe.budget, t.name):
        return recipe_dtype or _written(like)
    return recipe_dtype or promoted_dtype(t, [m.views for m in models])


def stored_tensors(
    recipe: Recipe, t: TensorRecipe, models: Sequence[Model]
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Name, dtype and shape of what the result has of an output tensor."""
    shape, dtype = stored_like(t, models).shape, out_dtype(recipe, t, models)
    return stored_as(t.name, shape, dtype, is_coded=t.name in recipe.coded)


def out_nbytes(recipe: Recipe, t: TensorRecipe, models: Sequence[Model]) -> int:
    """Bytes of what the result has of an output tensor."""
    stored = stored_tensors(recipe, t, models)
    return sum(prod(shape) * itemsize(dtype) for _, dtype, shape in stored)


def is_kept(budget: Budget, tensor: str) -> bool:
    """Whether an output tensor is to stay the base's."""
    return any(fnmatchcase(tensor, pattern) for pattern in budget.keep)
