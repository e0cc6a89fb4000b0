"""Parses recipes, from a file or a text, and says where in one a problem with a model stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.domain.selector import Selected, Selector
from mergepipe_pipeline.errors import BudgetError, CheckpointError, MergePipeError, RecipeError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.recipe.parse import Lost, parse_recipes
from mergepipe_pipeline.recipe.problems import KeyPath, line_of, shown_place, suggest
from mergepipe_pipeline.recipe.selectors import Choose, Recorded, nobody
from mergepipe_pipeline.recipe.structure import ParsedRecipe
from mergepipe_pipeline.recipe.yaml_text import MAX_NBYTES
from mergepipe_pipeline.remote.address import is_address, is_hub_name
from mergepipe_pipeline.resolution.locate import UNKNOWN_MODEL, Places
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
) -> ParsedRecipe:
    """Parse a recipe file. Raises RecipeError with all problems, also for a lost file or model.

    Its selectors are answered by `choose`, by default from the names of the warehouse as they are.
    Read `lenient`ly, what mergekit ignores is warned about instead.
    """
    file = Path(path)
    text = yaml_file(file, "recipe")
    choose = choose or Registered(warehouse, file.resolve().parent)
    name, where = text_of(file.stem), text_of(path)
    read = partial(parse, text, name=name, where=where, choose=choose, lenient=lenient)
    try:
        return _settled(text, name, where, lenient) or read()
    except (RecipeError, BudgetError):
        read(lost=partial(why_lost, warehouse, file.resolve().parent))
        raise


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


def parse_plan(plan: MergePlan) -> ParsedRecipe:
    """The recipe of a plan, its selectors answered as they were then."""
    choose, where = Recorded(plan.request.selected), f"plan {plan.plan_id[:16]}"
    text, name, lenient = plan.recipe_text, plan.recipe_name, plan.request.lenient
    return parse(text, name=name, where=where, choose=choose, lenient=lenient)


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


#: Where a tokenizer's source stands, which may be another word than a model's name.
_TOKENIZERS: tuple[KeyPath, ...] = (("tokenizer_source",), ("tokenizer", "source"))


def placed_in(parsed: ParsedRecipe, error: MergePipeError, ref: ModelRef) -> MergePipeError:
    """The error of opening a model, with the line and key of the recipe that names the model."""
    path = _path_of(parsed, parsed.references.index(ref))
    place = f"{parsed.where}, {shown_place(path, line_of(path, parsed.lines))}"
    error.where = f"{place}: {error.where}" if error.where else place
    found = error.found or ""
    if path in _TOKENIZERS and error.what == UNKNOWN_MODEL and not found.endswith("?"):
        error.found = found + suggest(ref.text, ("union", "base"))
    return error


def why_lost(warehouse: Warehouse, relative_to: Path, ref: ModelRef) -> str | None:
    """Why a model or its adapter cannot be opened here; None if it can, or if a server would be
    asked.
    """
    places = Places(warehouse, relative_to)
    if places.has(ref.text):
        return None
    for text, revision in ((ref.model, ref.revision), (ref.lora, ref.lora_revision)):
        if text is None or is_address(text) or is_hub_name(text):
            continue
        try:
            places.locate(text, revision)
        except CheckpointError as error:
            return f"{error.what[0].lower()}{error.what[1:]}: {error.found}"
    return None


def several(problems: Sequence[MergePipeError], parsed: ParsedRecipe) -> MergePipeError:
    """The one problem as itself, or an error that lists them all and explains each kind once."""
    problems = list({str(p): p for p in problems}.values())
    if len(problems) == 1:
        return problems[0]
    explained: set[tuple[str, str | None]] = set()
    flat: list[str] = []
    for p in problems:
        kind = (p.what, p.expected)
        again = MergePipeError(p.what, where=p.where, found=p.found) if kind in explained else p
        flat += p.problems or (str(again),)
        explained.add(kind)
    return RecipeError(
        "A recipe has several problems",
        where=parsed.where,
        problems=tuple(flat),
        next_step="correct them all; nothing was read or written",
    )


def _path_of(parsed: ParsedRecipe, number: int) -> KeyPath:
    """The key that names a model: as base, in a list, or for the tokenizer."""
    if number == parsed.base and ("base_model",) in parsed.lines:
        return ("base_model",)
    for _, part in parsed.slices():
        if number == part.base:
            return (*part.level.path, "base_model")
    for entry in parsed.entries():
        if number == entry.model:
            return (*entry.level.path, "model")
    if ("tokenizer_source",) in parsed.lines:
        return ("tokenizer_source",)
    for rule in () if parsed.tokenizer is None else parsed.tokenizer.tokens:
        if number == rule.model:
            return ("tokenizer", "tokens", rule.token, "source")
    return ("tokenizer", "source")
