"""Every table of a vocabulary follows the tokenizer, or the change is refused with its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.verbs.tools import transplant_tokenizer
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.tokenizer.models import document, entry, files_of

OWN, ADDED = 20, ("<|im_start|>", "<|im_end|>")
PER_LAYER = "embed_tokens_per_layer.weight"


def gemma(rows: int) -> Any:
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        vocab_size=rows,
        vocab_size_per_layer_input=rows,
        hidden_size=16,
        hidden_size_per_layer_input=8,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_kv_shared_layers=0,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["full_attention", "full_attention"],
        pad_token_id=0,
        dtype="float32",
    )
    return Gemma3nForCausalLM(config)


def bart(rows: int) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=rows,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        dtype="float32",
    )
    model = BartForConditionalGeneration(config)
    torch.nn.init.normal_(model.final_logits_bias)
    return model


def write(
    folder: Path, make: Callable[[int], Any], seed: int, added: tuple[str, ...] = (), first: int = 0
) -> Path:
    """A model whose words are numbered from `first`, with added tokens behind them."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{first + i}": i for i in range(3, OWN)}
    torch.manual_seed(seed)
    make(OWN + len(added)).save_pretrained(folder)
    entries = [entry(t, OWN + i, special=True) for i, t in enumerate(added)]
    for name, data in files_of(document(words, entries), unk_token="<unk>").items():
        (folder / name).write_bytes(data)
    return folder


def ids(folder: str | Path) -> dict[str, int]:
    from transformers import AutoTokenizer

    vocab: dict[str, int] = AutoTokenizer.from_pretrained(str(folder)).get_vocab()
    return vocab


def union_of(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Half of the sum of tables by token: the added tokens' rows are the second model's alone."""
    return torch.cat([(one + other[:OWN]) / 2, other[OWN:]])


def sum_by_hand(one: Path, other: Path) -> dict[str, torch.Tensor]:
    first, second = tensors(one), tensors(other)
    out = {}
    for name, value in first.items():
        if name.endswith("final_logits_bias"):
            out[name] = union_of(value[0], second[name][0])[None]
        elif len(value) == OWN:
            out[name] = union_of(value, second[name])
        else:
            out[name] = (value + second[name]) / 2
    return out


def merged(home: Warehouse, models: Sequence[Path], extra: str) -> str:
    one, other = models
    text = f"merge_method: linear\nmodels:\n- {{model: {one}, parameters: {{weight: 0.5}}}}\n"
    text += f"- {{model: {other}, parameters: {{weight: 0.5}}}}\n{extra}\n"
    return run(home, text).snapshot.path


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens).logits
    return found


@pytest.mark.parametrize("make", [gemma, bart])
def test_a_model_with_more_tables_than_two_computes_as_one_whose_rows_were_gathered_by_hand(
    home: Warehouse, tmp_path: Path, make: Callable[[int], Any]
) -> None:
    one, other = write(tmp_path / "one", make, 0), write(tmp_path / "two", make, 1, ADDED)
    path = merged(home, (one, other), "tokenizer_source: union")
    by_hand = make(OWN + 2)
    by_hand.load_state_dict(sum_by_hand(one, other), strict=False)
    by_hand.tie_weights()
    loaded = type(by_hand).from_pretrained(path)
    vocab = ids(path)
    assert [vocab[t] for t in ADDED] == [OWN, OWN + 1]
    assert loaded.config.vocab_size == OWN + 2
    tokens = torch.tensor([[vocab[t] for t in ("<s>", "w5", *ADDED, "w9")]])
    torch.testing.assert_close(logits(loaded, tokens), logits(by_hand, tokens))


@pytest.mark.parametrize("make", [gemma, bart])
def test_tables_are_permuted_with_the_tokens_of_another_models_tokenizer(
    home: Warehouse, tmp_path: Path, make: Callable[[int], Any]
) -> None:
    one, other = write(tmp_path / "one", make, 0), write(tmp_path / "two", make, 1, first=4)
    path = merged(home, (one, other), f"tokenizer_source: {other}")
    ours, vocab = ids(one), ids(path)
    shared = [t for t in vocab if t in ours]
    first, second, found = tensors(one), tensors(other), tensors(path)
    tables = [n for n, v in first.items() if OWN in v.shape]
    assert len(tables) == 2
    for name in tables:
        one_rows, two_rows, rows = (
            t[name].T if name.endswith("bias") else t[name] for t in (first, second, found)
        )
        at, own = [vocab[t] for t in shared], [ours[t] for t in shared]
        torch.testing.assert_close(rows[at], (one_rows[own] + two_rows[at]) / 2)


@pytest.mark.parametrize("make", [gemma, bart])
def test_rows_beyond_the_bases_are_left_out_of_every_table(
    home: Warehouse, tmp_path: Path, make: Callable[[int], Any]
) -> None:
    one, other = write(tmp_path / "one", make, 0), write(tmp_path / "two", make, 1, ADDED)
    text = f"merge_method: task_arithmetic\nbase_model: {one}\nmodels:\n"
    path = run(home, f"{text}- {{model: {other}, parameters: {{weight: 0.5}}}}\n").snapshot.path
    second = tensors(other)
    tables = {n: v for n, v in tensors(one).items() if OWN in v.shape}
    assert len(tables) == 2
    for name, value in tables.items():
        beside = second[name][:, :OWN] if name.endswith("bias") else second[name][:OWN]
        torch.testing.assert_close(tensors(path)[name], (value + beside) / 2)


def change(folder: Path, more: Mapping[str, torch.Tensor], **config: object) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | dict(more), path, metadata={"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | config))


def test_a_tensor_that_may_be_a_table_under_another_name_is_refused_with_its_name(
    home: Warehouse, tmp_path: Path
) -> None:
    folders = [write(tmp_path / "one", gemma, 0), write(tmp_path / "two", gemma, 1, ADDED)]
    for folder, rows in zip(folders, (OWN, OWN), strict=True):
        change(folder, {"model.value_embeds.weight": torch.ones(rows, 4)})
    with pytest.raises(MergePipeError, match=r"model\.value_embeds\.weight \[20, 4\]"):
        merged(home, folders, "tokenizer_source: union")
    assert merged(home, folders, "tokenizer_source: " + str(folders[0]))


def test_tables_of_unequal_length_are_refused_where_tokens_have_rows_in_one_alone(
    home: Warehouse, tmp_path: Path
) -> None:
    folders = [write(tmp_path / "one", gemma, 0), write(tmp_path / "two", gemma, 1, ADDED)]
    second = tensors(folders[1])
    change(folders[1], {f"model.{PER_LAYER}": second[f"model.{PER_LAYER}"][:OWN].clone()})
    with pytest.raises(MergePipeError, match="no rows for some of its model's tokens"):
        merged(home, folders, "tokenizer_source: union")


def test_a_table_that_ends_before_the_embedding_stays_where_no_token_moves(
    home: Warehouse, tmp_path: Path
) -> None:
    folders = [write(tmp_path / name, gemma, n, ADDED) for n, name in enumerate(("one", "two"))]
    for folder in folders:
        short = tensors(folder)[f"model.{PER_LAYER}"][:OWN].clone()
        change(folder, {f"model.{PER_LAYER}": short}, vocab_size_per_layer_input=OWN)
    path = merged(home, folders, "tokenizer_source: union")
    found = json.loads((Path(path) / "config.json").read_text())
    assert (found["vocab_size"], found["vocab_size_per_layer_input"]) == (OWN + 2, OWN)
    first, second = (tensors(folder)[f"model.{PER_LAYER}"] for folder in folders)
    torch.testing.assert_close(tensors(path)[f"model.{PER_LAYER}"], (first + second) / 2)


def test_a_config_that_states_the_heads_rows_keeps_them_where_the_embedding_has_more(
    home: Warehouse, tmp_path: Path
) -> None:
    folders = [write(tmp_path / name, gemma, n, ADDED) for n, name in enumerate(("one", "two"))]
    for folder in folders:
        change(folder, {"lm_head.weight": torch.ones(OWN, 16)}, vocab_size=OWN)
    path = merged(home, folders, "")
    assert json.loads((Path(path) / "config.json").read_text())["vocab_size"] == OWN


def test_transplanted_tokens_have_rows_in_every_table(home: Warehouse, tmp_path: Path) -> None:
    recipient, donor = write(tmp_path / "one", gemma, 0), write(tmp_path / "two", gemma, 1, ADDED)
    made = transplant_tokenizer(home, str(recipient), str(donor))
    own, found = tensors(recipient), tensors(made.path)
    name = f"model.{PER_LAYER}"
    assert found[name].shape[0] == found["model.embed_tokens.weight"].shape[0] == OWN + 2
    assert torch.equal(found[name][:OWN], own[name])
    config = json.loads((Path(made.path) / "config.json").read_text())
    assert config["vocab_size"] == config["vocab_size_per_layer_input"] == OWN + 2
