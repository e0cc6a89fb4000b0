"""Models out of nothing for the recipes of the corpus: as many layers as a recipe asks for."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe_pipeline.domain.recipe import Recipe
from mergepipe_pipeline.recipe.model_tensors import ModelTable
from mergepipe_pipeline.recipe.parse import parse_recipes, resolve_recipe
from mergepipe_pipeline.recipe.structure import ParsedRecipe
from tests.recipe.schemas import METHODS, Table, names_of, table

_VISION = tuple(f"visual.blocks.{k}.attn.qkv.weight" for k in range(2))


def parse_all(text: str) -> tuple[ParsedRecipe, ...]:
    """The stages of a file, with the methods of `schemas`."""
    return parse_recipes(text, name="demo", where="demo.yml", methods=METHODS)


def resolve_all(text: str) -> tuple[Recipe, ...]:
    """Every stage resolved in order, a stage's result having the tensors that it says.

    Models of a recipe that names `org/…` have the layers the file's slices take, or 32; others
    three.
    """
    made: dict[str, Table] = {}
    recipes = []
    raws = parse_all(text)
    n_layers = layers_of(raws, default=32) if "org/" in text else 3
    for raw in raws:
        models = [
            ModelTable(ref, made.get(ref.text, _model(raw, n_layers))) for ref in raw.references
        ]
        recipe = resolve_recipe(raw, models)
        recipes.append(recipe)
        made[raw.stage or ""] = table([t.name for t in recipe.tensors])
    return tuple(recipes)


def layers_of(raws: Sequence[ParsedRecipe], default: int = 3) -> int:
    """As many layers as the slices of a file's recipes take at most."""
    return max((e.layers[1] for raw in raws for e in raw.entries() if e.layers), default=default)


def _model(raw: ParsedRecipe, n_layers: int) -> Table:
    vision = _VISION if any(module.name for module in raw.modules) else ()
    return table((*names_of(n_layers), *vision))
