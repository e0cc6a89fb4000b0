"""Problems of a recipe's models: where the recipe names the model, and several problems in one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.errors import CheckpointError, MergePipeError, RecipeError
from mergepipe_pipeline.recipe.problems import KeyPath, line_of, shown_place, suggest
from mergepipe_pipeline.recipe.structure import ParsedRecipe
from mergepipe_pipeline.remote.address import is_address, is_hub_name
from mergepipe_pipeline.resolution.locate import UNKNOWN_MODEL, exists, locate_checkpoint
from mergepipe_pipeline.warehouse import Warehouse

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
    if exists(warehouse, ref.text, relative_to):
        return None
    for text, revision in ((ref.model, ref.revision), (ref.lora, ref.lora_revision)):
        if text is None or is_address(text) or is_hub_name(text):
            continue
        try:
            locate_checkpoint(warehouse, text, relative_to, revision=revision)
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
