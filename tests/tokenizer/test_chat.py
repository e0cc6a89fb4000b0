"""Chat templates: what a recipe's word means, what the built-in ones render, where they are set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.tokenizer.chat import chat_template, template_of, with_chat_template
from mergepipe_pipeline.tokenizer.model_tokenizer import ModelTokenizer, read_tokenizer
from tests.tokenizer.models import document, files_of, words

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "More"},
]
EXPECTED = {
    "alpaca": "Be kind.\n\n### Instruction:\nHi\n\n### Response:\nYo</s>\n\n"
    "### Instruction:\nMore\n\n### Response:\n",
    "chatml": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n"
    "<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nMore<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] Be kind.\n\nHi [/INST] Yo</s>[INST] More [/INST]",
    "exaone": "[|system|]Be kind.[|endofturn|]\n[|user|]Hi\n[|assistant|]Yo[|endofturn|]\n"
    "[|user|]More\n[|assistant|]",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_built_in_template_renders_the_published_format(name: str, tmp_path: Path) -> None:
    template = chat_template(name, [])
    assert template is not None
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    files = with_chat_template(files_of(document({"<s>": 0, "</s>": 1}), **special), template)
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert rendered == EXPECTED[name]


def model(**config: Any) -> ModelTokenizer:
    return words("m", {"x": 0}, **config)


def auto(*models: ModelTokenizer) -> str | None:
    return chat_template("auto", [(m.name, m.files) for m in models])


def test_auto_takes_the_most_frequent_template_and_the_earlier_of_equals() -> None:
    jinja = read_tokenizer("j", {"chat_template.jinja": b"{{ 2 }}\n"}, 1)
    named = [{"name": "tool", "template": "{{ 9 }}"}, {"name": "default", "template": "{{ 2 }}"}]
    one, two, none = model(chat_template="{{ 1 }}"), model(chat_template=named), model()
    assert auto(none, one, two) == "{{ 1 }}"
    assert auto(one, two, jinja) == "{{ 2 }}"
    assert auto(none) is None
    assert chat_template("auto", []) is None


def test_a_jinja_file_goes_before_the_configuration() -> None:
    both = {**model(chat_template="{{ 1 }}").files, "chat_template.jinja": b"{{ 2 }}"}
    assert auto(read_tokenizer("m", both, 1)) == "{{ 2 }}"
    with pytest.raises(CheckpointError, match="chat template cannot be read"):
        auto(read_tokenizer("m", {"chat_template.jinja": b"\xff"}, 1))


@pytest.mark.parametrize(
    "stated", [[{"name": [], "template": "x"}], [1], {"default": 1}, {"default": {}}, 5, [[]]]
)
def test_a_stated_template_of_another_kind_is_none(stated: object) -> None:
    assert template_of(model(chat_template=stated).files, "m") is None


def test_a_text_of_twenty_characters_with_a_brace_is_a_template() -> None:
    text = "{{ messages[0].role }}"
    assert chat_template(text, []) == text


def test_a_set_template_replaces_every_other() -> None:
    files = {**model(chat_template="old", eos_token="x").files, "chat_template.jinja": b"older"}
    out = with_chat_template(files, "{{ new }}")
    config = json.loads(out["tokenizer_config.json"])
    assert (config["chat_template"], config["eos_token"]) == ("{{ new }}", "x")
    assert "chat_template.jinja" not in out
    assert with_chat_template({}, "{{ new }}").keys() == {"tokenizer_config.json"}
