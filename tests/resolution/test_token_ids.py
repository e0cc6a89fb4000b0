"""Ids of tokens follow the tokenizer and the chat template that a result has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.support.family import write_adapter
from tests.tokenizer.models import document, entry, files_of

ROWS = 24
TURN = ("<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
#: What else a generation config may state of tokens.
MORE = {
    "suppress_tokens": [3, 20],
    "bad_words_ids": [[5], [21, 6]],
    "forced_decoder_ids": [[1, 21]],
    "sequence_bias": [[[20, 4], -1.0]],
    "temperature": 0.5,
}


def write(
    folder: Path,
    seed: int,
    added: tuple[str, ...] = (),
    *,
    first: int = 0,
    template: str | None = None,
    generation: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A llama whose first tokens are numbered words, then added tokens, then rows without any."""
    from transformers import LlamaConfig, LlamaForCausalLM

    stated = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None} | config
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=ROWS,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            dtype="float32",
            **stated,
        )
    )
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(folder, added, first, template)
    return folder


def write_tokenizer(
    folder: Path, added: tuple[str, ...] = (), first: int = 0, template: str | None = None
) -> None:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{first + i}": i for i in range(3, 20)}
    entries = [entry(t, 20 + i, special=True) for i, t in enumerate(added)]
    files = files_of(document(words, entries), unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if template:
        (folder / "chat_template.jinja").write_text(template)


def merged(home: Warehouse, base: Path, expert: Path, extra: str) -> tuple[Path, list[str]]:
    text = f"merge_method: task_arithmetic\nbase_model: {base}\nmodels:\n"
    text += f"- {{model: {expert}, parameters: {{weight: 1.0}}}}\n{extra}\n"
    outcome = run(home, text)
    return Path(outcome.snapshot.path), list(outcome.plan.warnings)


def stated(folder: Path, file: str = "generation_config.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / file).read_text())
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "raw", 0, generation={"bos_token_id": 1, "eos_token_id": 2, **MORE})


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A model that ends turns with a token that the base has not, and a pad token."""
    return write(
        tmp_path / "chat",
        1,
        TURN,
        template=TEMPLATE,
        generation={"eos_token_id": [21, 2], "pad_token_id": 20, "do_sample": True},
        eos_token_id=21,
        pad_token_id=20,
    )


def test_generation_stops_where_the_model_that_gave_the_tokenizer_stops(
    home: Warehouse, tmp_path: Path, base: Path, chat: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path, _ = merged(home, base, chat, f"tokenizer_source: {chat}")
    assert stated(path, "config.json")["eos_token_id"] == 21
    assert stated(path, "config.json")["pad_token_id"] == 20
    generation = stated(path)
    assert (generation["eos_token_id"], generation["pad_token_id"]) == ([21, 2], 20)
    assert generation["temperature"] == 0.5
    assert "do_sample" not in generation
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    model.lm_head = torch.nn.Linear(16, ROWS)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()[21] = 1.0
    out = model.generate(torch.tensor([[1, 5]]), max_new_tokens=8, do_sample=False)
    assert out.tolist() == [[1, 5, 21]]


def test_without_a_tokenizer_or_template_of_another_model_no_file_changes(
    home: Warehouse, base: Path, chat: Path
) -> None:
    path, _ = merged(home, base, chat, "")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (path / name).read_bytes() == (base / name).read_bytes()
    assert stated(path, "config.json")["eos_token_id"] == 2


def test_a_union_keeps_the_bases_ids(home: Warehouse, base: Path, chat: Path) -> None:
    path, _ = merged(home, base, chat, "tokenizer_source: union")
    assert (stated(path)["bos_token_id"], stated(path)["eos_token_id"]) == (1, 2)
    config = stated(path, "config.json")
    assert (config["eos_token_id"], config["pad_token_id"]) == (2, None)


def test_a_template_taken_from_another_model_brings_its_ends_under_the_results_numbers(
    home: Warehouse, tmp_path: Path, chat: Path
) -> None:
    other = write(tmp_path / "other", 2, ("<tool>", *TURN), generation={"eos_token_id": 2})
    path, _ = merged(home, other, chat, "tokenizer_source: union\nchat_template: auto")
    assert stated(path)["eos_token_id"] == [22, 2]
    path, _ = merged(home, other, chat, "chat_template: auto")
    assert stated(path)["eos_token_id"] == [22, 2]
    assert stated(path, "config.json")["eos_token_id"] == 22
    assert stated(path, "config.json")["pad_token_id"] is None


def test_an_end_that_the_result_has_no_token_for_is_left_out_and_said(
    home: Warehouse, base: Path, chat: Path
) -> None:
    path, warnings = merged(home, base, chat, "chat_template: auto")
    assert stated(path)["eos_token_id"] == [2]
    assert any("eos_token_id" in w and "21" in w for w in warnings)


def test_ids_that_the_giver_of_the_tokenizer_does_not_state_follow_their_tokens(
    home: Warehouse, tmp_path: Path
) -> None:
    base = write(tmp_path / "base", 0, TURN, generation=MORE, image_token_index=21)
    other = write(tmp_path / "other", 1, tuple(reversed(TURN)), first=2)
    path, warnings = merged(home, base, other, f"tokenizer_source: {other}")
    assert stated(path, "config.json")["image_token_index"] == 20
    found = stated(path)
    assert found["suppress_tokens"] == [21]  # w3 is no token of the other
    assert found["bad_words_ids"] == [[3], [20, 4]]
    assert found["forced_decoder_ids"] == [[1, 20]]
    assert found["sequence_bias"] is None
    assert any("suppress_tokens" in w for w in warnings)


def test_an_id_that_a_model_needs_and_the_result_has_no_token_for_is_refused(
    home: Warehouse, tmp_path: Path
) -> None:
    base = write(tmp_path / "base", 0, TURN, image_token_index=21)
    other = write(tmp_path / "other", 1)
    with pytest.raises(IncompatibleCheckpointsError, match="image_token_index"):
        merged(home, base, other, f"tokenizer_source: {other}")


def test_a_row_without_a_token_that_a_union_gives_to_one_is_no_pad_any_more(
    home: Warehouse, tmp_path: Path, chat: Path
) -> None:
    base = write(tmp_path / "base", 0, pad_token_id=20)
    path, warnings = merged(home, base, chat, "tokenizer_source: union")
    assert stated(path, "config.json")["pad_token_id"] is None
    assert any("pad_token_id" in w for w in warnings)


def test_a_built_in_template_whose_ends_the_model_does_not_stop_at_is_said(
    home: Warehouse, base: Path, chat: Path
) -> None:
    _, warnings = merged(home, base, chat, "chat_template: chatml")
    assert any("<|im_end|>" in w and "goes on" in w for w in warnings)
    _, warnings = merged(home, chat, base, "chat_template: chatml")
    assert not any("goes on" in w for w in warnings)


@pytest.mark.parametrize("has_base", [False, True])
def test_an_adapters_own_tokenizer_is_taken_where_the_recipe_names_it(
    home: Warehouse, tmp_path: Path, base: Path, has_base: bool
) -> None:
    adapter = write_adapter(tmp_path / "ad", 3, hidden=16)
    write_tokenizer(adapter, TURN, template=TEMPLATE)
    (adapter / "generation_config.json").write_text('{"eos_token_id": [21]}')
    text = f"merge_method: passthrough\nmodels:\n- model: {base}+{adapter}\n"
    text += f"base_model: {base}\n" if has_base else ""
    plain = run(home, text)
    assert any(f"tokenizer_source: {base}+{adapter}" in w for w in plain.plan.warnings)
    assert stated(Path(plain.snapshot.path))["eos_token_id"] == 2
    path = Path(run(home, f"{text}tokenizer_source: {base}+{adapter}\n").snapshot.path)
    assert stated(path)["eos_token_id"] == [21]
    assert stated(path, "config.json")["eos_token_id"] == [21]
    assert (path / "chat_template.jinja").read_text() == TEMPLATE
    assert stated(path, "tokenizer.json")["added_tokens"][-1]["content"] == "<|im_end|>"
