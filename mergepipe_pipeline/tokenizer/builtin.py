"""Chat templates by name, written from the published prompt formats.

Jinja as transformers renders it (trim_blocks and lstrip_blocks on). All take `messages` of `role`
and `content`, and `add_generation_prompt`.
"""

from __future__ import annotations

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
