"""The tokenizer that a recipe asks for: whose it is, and where single tokens' embeddings come from.

Reads the text only; `resolution` knows which model has which token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mergepipe_pipeline.domain.recipe import TokenizerRecipe, TokenRule
from mergepipe_pipeline.recipe.keys import Keys, Reference, expecting, is_bool, whole
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown, suggest
from mergepipe_pipeline.recipe.references import UnreadableReference, parse_reference
from mergepipe_pipeline.recipe.structure import Models

CHAT_TEMPLATES = ("auto", "alpaca", "chatml", "llama3", "mistral", "exaone")
_MIN_JINJA_CHARS = 20
#: Far beyond what any kernel wants, and still a matrix that can be written.
_MAX_PAD = 1 << 16


class _OtherRow(Keys):
    """A row that is not the token's own: zeros, or that of another token."""

    kind: Annotated[Any, expecting("model_token or zero", ("model_token", "zero").__contains__)]
    model: Reference = None
    token: Annotated[Any, expecting("a token's text", lambda v: isinstance(v, str))] = None
    token_id: Annotated[
        Any, expecting("a number from 0 up", lambda v: type(v) is int and v >= 0)
    ] = None

    @model_validator(mode="after")
    def _one_row(self) -> Self:
        if self.kind == "zero" and len(self.model_fields_set) > 1:
            raise ValueError("a row of zeros is of no model and no token")
        if self.kind == "model_token" and (self.token is None) == (self.token_id is None):
            raise ValueError("give exactly one of `token:` and `token_id:`")
        if self.kind == "model_token" and self.model is None:
            raise ValueError("a token of another model needs `model:`")
        return self


class _Rule(Keys):
    source: Any = None
    force: Annotated[Any, expecting("true or false", is_bool)] = False


class _Tokenizer(Keys):
    source: Any = "union"
    tokens: dict[str, _Rule | None] = Field(default={})
    pad_to_multiple_of: Annotated[Any, whole(1, _MAX_PAD)] = None


def read_tokenizer(
    value: Mapping[str, object], base: int | None, models: Models, problems: Problems
) -> TokenizerRecipe | None:
    """The tokenizer of `tokenizer_source:` or `tokenizer:`; None if the recipe has neither.

    `base` is the base's number; adds to `models` those that are named here alone. Problems are
    added at their places.
    """
    source, mapping = value.get("tokenizer_source"), value.get("tokenizer")
    if source is not None and mapping is not None:
        problems.add(("tokenizer_source",), "give either `tokenizer_source:` or `tokenizer:`")
        return None
    reader = _Reader(base, models, problems)
    if source is not None:
        number = reader.source(source, ("tokenizer_source",))
        return None if number is None else TokenizerRecipe(number)
    keys = None if mapping is None else _Tokenizer.read(mapping, ("tokenizer",), problems)
    if keys is None:
        return None
    number = reader.source(keys.source, ("tokenizer", "source"))
    rules = [reader.rule(token, rule or _Rule()) for token, rule in keys.tokens.items()]
    known = tuple(rule for rule in rules if rule is not None)
    return None if number is None else TokenizerRecipe(number, known, keys.pad_to_multiple_of)


@dataclass(frozen=True)
class _Reader:
    """Numbers the models that the tokenizer's keys name."""

    base: int | None
    models: Models
    problems: Problems

    def source(self, value: object, path: KeyPath) -> int | Literal["union"] | None:
        if value == "union":
            return "union"
        if value != "base":
            return self.number(value, path)
        if self.base is None:
            self.problems.add(path, "`base` needs `base_model:`, and there is none")
        return self.base

    def number(self, reference: object, path: KeyPath) -> int | None:
        try:
            parse_reference(reference)
        except UnreadableReference as error:
            self.problems.add(path, str(error))
        return self.models.number(reference)

    def rule(self, token: str, rule: _Rule) -> TokenRule | None:
        source, path = rule.source, ("tokenizer", "tokens", token, "source")
        if source is None:
            return TokenRule(token, "default", force=rule.force)
        if not (isinstance(source, dict) and "kind" in source):
            model = self.number(source, path)
            return None if model is None else TokenRule(token, "model", model, force=rule.force)
        row = _OtherRow.read(source, path, self.problems)
        if row is None:
            return None
        model = None if row.model is None else self.number(row.model, path)
        return TokenRule(token, row.kind, model, row.token, row.token_id, rule.force)


def check_chat_template(value: object, problems: Problems) -> str | None:
    """The template's text, `auto`, or the name of a known one; None where none is asked for."""
    if value is None:
        return None
    text = value if isinstance(value, str) else ""
    if text in CHAT_TEMPLATES or ("{" in text and len(text) >= _MIN_JINJA_CHARS):
        return text
    near = suggest(text, CHAT_TEMPLATES)
    problems.add(
        ("chat_template",),
        f"expected {', '.join(CHAT_TEMPLATES)} or a Jinja template of at least {_MIN_JINJA_CHARS} "
        f"characters, found {shown(value)}{near}",
    )
    return None
