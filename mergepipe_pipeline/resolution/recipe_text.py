"""Parses recipes: a file, or text from elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mergepipe_pipeline.errors import CheckpointError, RecipeError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.recipe.parse import ParsedRecipe, parse_recipes
from mergepipe_pipeline.recipe.selectors import Choose, Recorded, nobody
from mergepipe_pipeline.recipe.yaml_text import MAX_NBYTES
from mergepipe_pipeline.resolution.selected import Registered
from mergepipe_pipeline.spec.plan import MergePlan
from mergepipe_pipeline.storage.regular import read_small, text_of
from mergepipe_pipeline.warehouse import Warehouse

SCHEMAS = {name: operator.schema for name, operator in OPERATORS.items()}


def load_recipe(
    path: str | Path, warehouse: Warehouse, choose: Choose | None = None
) -> ParsedRecipe:
    """Parse a recipe file. Raises RecipeError with all problems, also for a lost file.

    Its selectors are answered by `choose`, by default from the names of the warehouse as they are.
    """
    file = Path(path)
    try:
        text = read_small(file, MAX_NBYTES).decode()
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        raise RecipeError(
            "A recipe cannot be read",
            where=text_of(path),
            expected=f"a YAML file in UTF-8, of at most {MAX_NBYTES} bytes",
            found=str(error.found if isinstance(error, CheckpointError) else error),
            next_step="check the path",
        ) from error
    choose = choose or Registered(warehouse, file.resolve().parent)
    return parse(text, name=text_of(file.stem), where=text_of(path), choose=choose)


def parse_plan(plan: MergePlan) -> ParsedRecipe:
    """The recipe of a plan, its selectors answered as they were then."""
    choose, where = Recorded(plan.request.selected), f"plan {plan.plan_id[:16]}"
    return parse(plan.recipe_text, name=plan.recipe_name, where=where, choose=choose)


def parse(text: str, *, name: str, where: str, choose: Choose = nobody) -> ParsedRecipe:
    """Parse recipe text with the operators there are; earlier stages are in `before`.

    Raises RecipeError, BudgetError.
    """
    *before, final = parse_recipes(text, name=name, where=where, methods=SCHEMAS, choose=choose)
    return replace(final, before=tuple(before), text=text) if before else final
