"""The chat template of a merge's output: chosen by a recipe, set in the tokenizer's files.

Templates are texts here; nothing renders them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mergepipe_pipeline.errors import CheckpointError, RecipeError
from mergepipe_pipeline.storage.json_text import json_bytes
from mergepipe_pipeline.tokenizer.builtin import BUILT_IN
from mergepipe_pipeline.tokenizer.model_tokenizer import (
    CONFIG,
    TEMPLATE,
    ModelTokenizer,
    json_object,
)

_MIN_CHARACTERS = 20


def chat_template(text: str, models: Sequence[ModelTokenizer]) -> str | None:
    """The Jinja text that a recipe's `chat_template` means.

    "auto": the most frequent among the models, the earlier one of equals, None if no model has one.
    Else the name of a built-in template, or a template. Raises RecipeError for anything else.
    Source: mergekit 0.1.5 (SEMANTICS.md 3.1).
    """
    if text == "auto":
        templates = [t.strip() for m in models if (t := template_of(m))]
        return Counter(templates).most_common(1)[0][0] if templates else None
    if text in BUILT_IN:
        return BUILT_IN[text]
    if len(text) < _MIN_CHARACTERS or "{" not in text:
        raise RecipeError(
            "Not a chat template",
            where="chat_template",
            expected=f"auto, {', '.join(BUILT_IN)}, or a Jinja text of {_MIN_CHARACTERS} characters"
            " or more",
            found=repr(text[:80]),
            next_step="correct chat_template, or leave it out",
        )
    return text


def template_of(model: ModelTokenizer) -> str | None:
    """The model's own (default) chat template; chat_template.jinja goes before the configuration.

    Raises CheckpointError if a file is damaged.
    """
    if TEMPLATE in model.files:
        try:
            return model.files[TEMPLATE].decode() or None
        except UnicodeDecodeError as error:
            raise CheckpointError(
                "A chat template cannot be read",
                where=f"{model.name}/{TEMPLATE}",
                expected="UTF-8 text",
                found=str(error),
                next_step="copy the model's tokenizer files again, or name a template",
            ) from error
    stated: Any = json_object(model.files, CONFIG, model.name).get("chat_template")
    if isinstance(stated, list):
        named = [e for e in stated if isinstance(e, dict) and e.get("name") == "default"]
        stated = named[-1].get("template") if named else None
    elif isinstance(stated, dict):
        stated = stated.get("default")
    return stated if isinstance(stated, str) and stated else None


def with_chat_template(files: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """The tokenizer's files with `template` as the only chat template."""
    config = json_object(files, CONFIG, "output") | {"chat_template": template}
    beside = (TEMPLATE, "additional_chat_templates/")
    kept = {name: data for name, data in files.items() if not name.startswith(beside)}
    return {**kept, CONFIG: json_bytes(config)}
