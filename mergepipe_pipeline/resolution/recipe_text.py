"""Parses recipes: a file, or text from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.selector import Selected, Selector
from mergepipe_pipeline.errors import BudgetError, CheckpointError, RecipeError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.recipe.parse import Lost, ParsedRecipe, parse_recipes
from mergepipe_pipeline.recipe.selectors import Choose, Recorded, nobody
from mergepipe_pipeline.recipe.yaml_text import MAX_NBYTES
from mergepipe_pipeline.resolution.model_problems import why_lost
from mergepipe_pipeline.resolution.selected import Registered
from mergepipe_pipeline.storage.regular import read_small, text_of
from mergepipe_pipeline.warehouse import Warehouse

SCHEMAS = {name: operator.schema for name, operator in OPERATORS.items()}


def load_recipe(
    path: str | Path,
    warehouse: Warehouse,
    choose: Choose | None = None,
    *,
    lenient: bool = False,
    copy_tokenizer: bool = True,
    truncate_embeddings: bool = False,
) -> ParsedRecipe:
    """Parse a recipe file. Raises RecipeError with all problems, also for a lost file or model.

    Its selectors are answered by `choose`, by default from the names of the warehouse as they are.
    Read `lenient`ly, what mergekit ignores is warned about instead. `truncate_embeddings` crops
    vocabularies to the shortest; without `copy_tokenizer` the result has none.
    """
    file = Path(path)
    text = yaml_file(file, "recipe")
    choose = choose or Registered(warehouse, file.resolve().parent)
    name, where = text_of(file.stem), text_of(path)
    read = partial(parse, text, name=name, where=where, choose=choose, lenient=lenient)
    try:
        parsed = _settled(text, name, where, lenient) or read()
    except (RecipeError, BudgetError):
        read(lost=partial(why_lost, warehouse, file.resolve().parent))
        raise
    return as_asked(parsed, copies_tokenizer=copy_tokenizer, truncates=truncate_embeddings)


class _AskedError(Exception):
    """A recipe has a selector."""


def _ask(place: str, selector: Selector, reserved: Mapping[str, str]) -> Selected:
    raise _AskedError


@lru_cache(maxsize=512)  # sensors read every recipe at each tick
def _settled(text: str, name: str, where: str, lenient: bool) -> ParsedRecipe | None:
    """The recipe of a text; None if it has a selector, whose answer changes with the catalog."""
    try:
        return parse(text, name=name, where=where, choose=_ask, lenient=lenient)
    except _AskedError:
        return None


def yaml_file(path: Path, kind: str) -> str:
    """The text of a recipe or another `kind` of YAML file. Raises RecipeError."""
    next_step = "check the path"
    try:
        return read_small(path, MAX_NBYTES).decode()
    except UnicodeDecodeError as error:
        found, next_step = f"byte {error.start}, which is not UTF-8 text", "save the file as UTF-8"
    except CheckpointError as error:
        found, next_step = error.found or "", error.next_step or next_step
    except OSError as error:
        found = error.strerror or str(error)
    raise RecipeError(
        f"A {kind} cannot be read",
        where=text_of(path),
        expected=f"a YAML file in UTF-8, of at most {MAX_NBYTES} bytes",
        found=found,
        next_step=next_step,
    )


def as_asked(parsed: ParsedRecipe, *, copies_tokenizer: bool, truncates: bool) -> ParsedRecipe:
    """The recipe and its stages with what was asked for beside the text."""

    def asked(stage: ParsedRecipe) -> ParsedRecipe:
        return replace(stage, copies_tokenizer=copies_tokenizer, truncates=truncates)

    return replace(asked(parsed), before=tuple(map(asked, parsed.before)))


def parse_plan(plan: MergePlan) -> ParsedRecipe:
    """The recipe of a plan, its selectors answered as they were then."""
    choose, where = Recorded(plan.request.selected), f"plan {plan.plan_id[:16]}"
    request, text = plan.request, plan.recipe_text
    parsed = parse(text, name=plan.recipe_name, where=where, choose=choose, lenient=request.lenient)
    return as_asked(parsed, copies_tokenizer=request.copies_tokenizer, truncates=request.truncates)


def parse(
    text: str,
    *,
    name: str,
    where: str,
    choose: Choose = nobody,
    lenient: bool = False,
    lost: Lost = lambda _: None,
) -> ParsedRecipe:
    """Parse recipe text with the operators there are; earlier stages are in `before`.

    Raises RecipeError, BudgetError.
    """
    *before, final = parse_recipes(
        text, name=name, where=where, methods=SCHEMAS, choose=choose, lenient=lenient, lost=lost
    )
    return replace(final, before=tuple(before), text=text) if before else final
