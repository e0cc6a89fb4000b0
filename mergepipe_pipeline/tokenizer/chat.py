"""The chat template of a merge's output: chosen by a recipe, set in the tokenizer's files.

Templates are texts here; nothing renders them. Those with a name are written from the published
prompt formats, in Jinja as transformers renders it (trim_blocks and lstrip_blocks on); all take
`messages` of `role` and `content`, and `add_generation_prompt`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.json_text import json_bytes
from mergepipe_pipeline.tokenizer.model_tokenizer import CONFIG, TEMPLATE, json_object

#: Templates by name, each a file: Stanford Alpaca's prompt (later turns repeat the headings),
#: OpenAI's ChatML, Meta's Llama 3 without tools, Mistral 7B Instruct (the system text goes before
#: the first instruction), LG's EXAONE 3.
BUILT_IN = ("alpaca", "chatml", "llama3", "mistral", "exaone")

#: The token that ends a turn, of templates that name one.
ENDS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "exaone": "[|endofturn|]",
}


def built_in(name: str) -> str:
    """The template of that name."""
    folder = files("mergepipe_pipeline.tokenizer") / "templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def chat_template(text: str, models: Iterable[tuple[str, Mapping[str, bytes]]]) -> str | None:
    """The Jinja text that a recipe's `chat_template` means; `models` by name, with their files.

    "auto": the most frequent among the models, the earlier one of equals, None if no model has one.
    Else the name of a built-in template, or a template. Source: mergekit 0.1.5 (SEMANTICS.md 3.1).
    """
    if text == "auto":
        templates = [t.strip() for name, own in models if (t := template_of(own, name))]
        return Counter(templates).most_common(1)[0][0] if templates else None
    return built_in(text) if text in BUILT_IN else text


def template_of(own: Mapping[str, bytes], name: str) -> str | None:
    """The (default) chat template in a model's files; the file of its own goes before the others.

    Raises CheckpointError if a file is damaged.
    """
    if TEMPLATE in own:
        try:
            return own[TEMPLATE].decode() or None
        except UnicodeDecodeError as error:
            raise CheckpointError(
                "A chat template cannot be read",
                where=f"{name}/{TEMPLATE}",
                expected="UTF-8 text",
                found=str(error),
                next_step="copy the model's tokenizer files again, or name a template",
            ) from error
    stated: Any = json_object(own, CONFIG, name).get("chat_template")
    if isinstance(stated, list):
        named = [e for e in stated if isinstance(e, dict) and e.get("name") == "default"]
        stated = named[-1].get("template") if named else None
    elif isinstance(stated, dict):
        stated = stated.get("default")
    return stated if isinstance(stated, str) and stated else None


def with_chat_template(own: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """The tokenizer's files with `template` as the only chat template."""
    config = json_object(own, CONFIG, "output") | {"chat_template": template}
    beside = (TEMPLATE, "additional_chat_templates/")
    kept = {name: data for name, data in own.items() if not name.startswith(beside)}
    return {**kept, CONFIG: json_bytes(config)}
