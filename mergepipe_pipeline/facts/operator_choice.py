"""Lets a method that leaves the operator open choose one per tensor, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mergepipe_pipeline.domain.operator import Choosing
from mergepipe_pipeline.domain.recipe import Recipe, TensorRecipe
from mergepipe_pipeline.operators import OPERATORS


def choose_operators(
    recipe: Recipe, merged: Sequence[TensorRecipe], measured: Mapping[str, tuple[float, ...]]
) -> dict[str, Choosing]:
    """Output tensor to what the recipe's method chose for it; empty for methods that are one."""
    choose = OPERATORS[recipe.method].choose
    if choose is None:
        return {}
    out = {}
    for t in merged:
        rows = tuple(i.params for i in t.inputs)
        out[t.name] = choose(t.params, rows, measured[t.name])
    return out
