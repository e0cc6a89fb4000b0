"""Tiny models as GGUF, by llama.cpp's conventions and not by what reads them.

Names, keys and the order of rows are written out here from `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, quants

Values = Mapping[str, Any]

#: Ends of names, transformers' and llama.cpp's.
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
#: Of the architectures with four norms a layer.
_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
#: A text in which each byte has a letter, as byte-level vocabularies have it.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens with types and merges or scores; `pre` says how a byte-level one splits text."""

    model: str
    tokens: list[str]
    types: list[int]
    pre: str = "default"
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    settings: Values = field(default_factory=dict)


def byte_level(pre: str) -> Vocabulary:
    """All bytes, some merges, two special tokens and one that users defined."""
    others = iter(range(256, 512))
    letters = [chr(b if b in _PRINTED else next(others)) for b in range(256)]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "Ġ 1", "' s"]
    tokens = [*letters, *(m.replace(" ", "") for m in merges), "<|end|>", "<|pad|>", "<think>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    n = len(tokens)
    settings = {"bos_token_id": n - 3, "eos_token_id": n - 3, "padding_token_id": n - 2}
    return Vocabulary("gpt2", tokens, types, pre, merges, settings=settings)


def pieces(gemma: bool = False) -> Vocabulary:
    """A sentencepiece vocabulary of pieces with scores, and the bytes for all that is none."""
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w"]
    words += ["1", "2", "12", "▁▁", ".", "wo", "▁wo", "ld"]
    special = ["<unk>", "<bos>", "<eos>", "<pad>"] if gemma else ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), *words]
    types = [2] + [3] * (len(special) - 1) + [6] * 256 + [1] * len(words)
    scores = [0.0] * (len(special) + 256) + [-float(i) for i in range(len(words))]
    settings = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True}
    settings["padding_token_id"] = 3 if gemma else 0
    return Vocabulary("llama", tokens, types, scores=scores, settings=settings)


def stored_name(architecture: str, name: str) -> str:
    """llama.cpp's name of a tensor of transformers."""
    stem, _, end = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{end}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    assert layer
    names = _NAMES | (_NORMS if architecture in ("gemma2", "gemma3") else {})
    return f"blk.{layer[1]}.{names[layer[2]]}.{end}"


def stored_values(architecture: str, name: str, tensor: torch.Tensor, config: Any) -> Any:
    """A tensor's float32 values as llama.cpp lays them out."""
    values = tensor.detach().to(torch.float32).numpy()
    if architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
        q = config.num_attention_heads
        heads = q if ".q_proj." in name else config.num_key_value_heads
        pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        values = values + np.float32(1)
    return np.ascontiguousarray(values)


def llama3_factors(theta: float, width: int, factor: float, context: int) -> Any:
    """What llama.cpp writes of Llama 3.1's scaling of the rotary embedding."""
    found = []
    for i in range(0, width, 2):
        length = 2 * math.pi / (1.0 / theta ** (i / width))
        if length < context / 4:
            found.append(1.0)
        elif length > context / 1:
            found.append(factor)
        else:
            smooth = (context / length - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def write(
    path: Path,
    architecture: str,
    model: Any,
    vocabulary: Vocabulary,
    keys: Values | None = None,
    kinds: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A transformers model as a GGUF file.

    `keys` are metadata besides sizes, without the architecture, None for one that is left out;
    `kinds` types of tensors by llama.cpp's name (F32 for others), `extra` more tensors.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in {**sizes(model.config), **(keys or {})}.items():
        add(
            writer,
            key if key.startswith(("general.", "split.")) else f"{architecture}.{key}",
            value,
        )
    _add_vocabulary(writer, vocabulary)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stored = stored_name(architecture, name)
        values = stored_values(architecture, name, tensor, model.config)
        kind = Kind[(kinds or {}).get(stored, "F32")]
        writer.add_tensor(stored, quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sizes(config: Any) -> dict[str, Any]:
    """The metadata that every model has."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "vocab_size": config.vocab_size,
    }


def add(writer: Any, key: str, value: Any) -> None:
    """A key of the type that llama.cpp gives such a value."""
    if value is None:
        return
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for key, value in vocabulary.settings.items():
        add(writer, f"tokenizer.ggml.{key}", value)
