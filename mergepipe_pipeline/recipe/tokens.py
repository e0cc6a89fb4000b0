"""What a recipe wants of the tokenizer: whose it is, and where single tokens' embeddings come from.

Reads the text only; `resolution` knows which model has which token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from mergepipe_pipeline.domain.recipe import TokenizerRecipe, TokenRule
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown, suggest

#: Gives the number of the model a reference at a key path names, or None after noting a problem.
NumberOf = Callable[[object, KeyPath], int | None]

CHAT_TEMPLATES = ("auto", "alpaca", "chatml", "llama3", "mistral", "exaone")
_MIN_JINJA_CHARS = 20
#: Far beyond what any kernel wants, and still a matrix that can be written.
_MAX_PAD = 1 << 16
_KEYS = ("source", "tokens", "pad_to_multiple_of")
_RULE_KEYS = ("source", "force")
_SOURCE_KEYS = {"zero": ("kind",), "model_token": ("kind", "model", "token", "token_id")}


def parse_tokenizer(
    value: Mapping[str, object], base: int | None, number_of: NumberOf, problems: Problems
) -> TokenizerRecipe | None:
    """The wish in `tokenizer_source:` or `tokenizer:`; None if the recipe has none.

    `base` is the base's number. Problems are added at their places.
    """
    source, whole = value.get("tokenizer_source"), value.get("tokenizer")
    if source is not None and whole is not None:
        problems.add(("tokenizer_source",), "give either `tokenizer_source:` or `tokenizer:`")
        return None
    if source is not None:
        source_model = _source(source, ("tokenizer_source",), base, number_of, problems)
        return None if source_model is None else TokenizerRecipe(source_model)
    if whole is None:
        return None
    if not isinstance(whole, dict):
        problems.add(("tokenizer",), f"expected a mapping with `source:`, found {shown(whole)}")
        return None
    problems.add_unknown(whole, _KEYS, ("tokenizer",))
    source_model = _source(
        whole.get("source", "union"), ("tokenizer", "source"), base, number_of, problems
    )
    pad = whole.get("pad_to_multiple_of")
    if pad is not None and (type(pad) is not int or not 1 <= pad <= _MAX_PAD):
        problems.add(
            ("tokenizer", "pad_to_multiple_of"),
            f"expected a whole number from 1 to {_MAX_PAD}, found {shown(pad)}",
        )
        pad = None
    rules = _rules(whole.get("tokens"), number_of, problems)
    return None if source_model is None else TokenizerRecipe(source_model, rules, pad)


def check_chat_template(value: object, problems: Problems) -> str | None:
    """The template's text, `auto`, or the name of a known one; None for no wish."""
    if value is None:
        return None
    templates = ", ".join(CHAT_TEMPLATES)
    if not isinstance(value, str):
        problems.add(("chat_template",), f"expected {templates} or Jinja, found {shown(value)}")
        return None
    if value in CHAT_TEMPLATES or ("{" in value and len(value) >= _MIN_JINJA_CHARS):
        return value
    problems.add(
        ("chat_template",),
        f"expected {templates} or a Jinja template of at least {_MIN_JINJA_CHARS} characters, "
        f"found {shown(value)}{suggest(value, CHAT_TEMPLATES)}",
    )
    return None


def _source(
    value: object, path: KeyPath, base: int | None, number_of: NumberOf, problems: Problems
) -> int | Literal["union"] | None:
    if value == "union":
        return "union"
    if value != "base":
        return number_of(value, path)
    if base is None:
        problems.add(path, "`base` needs `base_model:`, and there is none")
    return base


def _rules(value: object, number_of: NumberOf, problems: Problems) -> tuple[TokenRule, ...]:
    path: KeyPath = ("tokenizer", "tokens")
    if value is None:
        return ()
    if not isinstance(value, dict):
        problems.add(path, f"expected a mapping of tokens, found {shown(value)}")
        return ()
    rules = (_rule(str(t), v, (*path, t), number_of, problems) for t, v in value.items())
    return tuple(rule for rule in rules if rule is not None)


def _rule(
    token: str, value: object, path: KeyPath, number_of: NumberOf, problems: Problems
) -> TokenRule | None:
    if value is None:
        return TokenRule(token, "default")
    if not isinstance(value, dict):
        problems.add(path, f"expected a mapping with `source:`, found {shown(value)}")
        return None
    problems.add_unknown(value, _RULE_KEYS, path)
    force, source = value.get("force", False), value.get("source")
    if not isinstance(force, bool):
        problems.add((*path, "force"), f"expected true or false, found {shown(force)}")
        return None
    source_path = (*path, "source")
    if source is None:
        return TokenRule(token, "default", force=force)
    if isinstance(source, dict) and "kind" in source:
        return _kind(token, source, force, source_path, number_of, problems)
    model = number_of(source, source_path)
    return None if model is None else TokenRule(token, "model", model, force=force)


def _kind(
    token: str,
    source: Mapping[str, object],
    force: bool,
    path: KeyPath,
    number_of: NumberOf,
    problems: Problems,
) -> TokenRule | None:
    kind = source["kind"]
    if not isinstance(kind, str) or kind not in _SOURCE_KEYS:
        problems.add((*path, "kind"), f"expected model_token or zero, found {shown(kind)}")
        return None
    problems.add_unknown(source, _SOURCE_KEYS[kind], path)
    if kind == "zero":
        return TokenRule(token, "zero", force=force)
    of_token, of_id = source.get("token"), source.get("token_id")
    if (of_token is None) == (of_id is None):
        problems.add(path, "give exactly one of `token:` and `token_id:`")
        return None
    if of_token is not None and not isinstance(of_token, str):
        problems.add((*path, "token"), f"expected a token's text, found {shown(of_token)}")
        return None
    if of_id is not None and (isinstance(of_id, bool) or not isinstance(of_id, int) or of_id < 0):
        problems.add((*path, "token_id"), f"expected a number from 0 up, found {shown(of_id)}")
        return None
    if "model" not in source:
        problems.add(path, "a token of another model needs `model:`")
        return None
    model = number_of(source["model"], (*path, "model"))
    if model is None:
        return None
    return TokenRule(token, "model_token", model, of_token, of_id, force)
