"""The chat template of a merge's output: chosen by a recipe, set in the tokenizer's files.

Templates are texts here; nothing renders them. Those with a name are written from the published
prompt formats, in Jinja as transformers renders it (trim_blocks and lstrip_blocks on); all take
`messages` of `role` and `content`, and `add_generation_prompt`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mergepipe_pipeline.errors import CheckpointError, RecipeError
from mergepipe_pipeline.storage.json_text import json_bytes
from mergepipe_pipeline.tokenizer.model_tokenizer import (
    CONFIG,
    TEMPLATE,
    ModelTokenizer,
    json_object,
)

# Stanford Alpaca's prompt: a preamble, then headed sections; later turns repeat the headings.
_ALPACA = """\
{% set preamble = 'Below is an instruction that describes a task. \
Write a response that appropriately completes the request.' %}
{% if messages and messages[0].role == 'system' %}
{% set preamble = messages[0].content %}
{% endif %}
{{ preamble + '\\n\\n' }}
{%- for m in messages %}
{% if m.role == 'user' %}
{{ '### Instruction:\\n' + m.content + '\\n\\n' }}
{%- elif m.role == 'assistant' %}
{{ '### Response:\\n' + m.content + eos_token | default('') + '\\n\\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '### Response:\\n' }}
{%- endif %}
"""

# OpenAI's ChatML.
_CHATML = """\
{% for m in messages %}
{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Meta's Llama 3 prompt format, without tools.
_LLAMA3 = """\
{{ bos_token | default('<|begin_of_text|>') }}
{%- for m in messages %}
{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' ~ m.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Mistral 7B Instruct: the system text goes before the first instruction.
_MISTRAL = """\
{% set state = namespace(system='') %}
{{ bos_token | default('<s>') }}
{%- for m in messages %}
{% if m.role == 'system' %}
{% set state.system = m.content ~ '\\n\\n' %}
{% elif m.role == 'user' %}
{{ '[INST] ' ~ state.system ~ m.content ~ ' [/INST]' }}
{%- set state.system = '' %}
{% elif m.role == 'assistant' %}
{{ ' ' ~ m.content | trim ~ eos_token | default('</s>') }}
{%- endif %}
{% endfor %}
"""

# LG's EXAONE 3.
_EXAONE = """\
{% if messages and messages[0].role != 'system' %}
{{ '[|system|][|endofturn|]\\n' }}
{%- endif %}
{% for m in messages %}
{{ '[|' ~ m.role ~ '|]' ~ m.content }}
{%- if m.role != 'user' %}
{{ '[|endofturn|]' }}
{%- endif %}
{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '[|assistant|]' }}
{%- endif %}
"""

BUILT_IN = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
    "exaone": _EXAONE,
}

#: The token that ends a turn, of templates that name one.
ENDS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "exaone": "[|endofturn|]",
}


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
