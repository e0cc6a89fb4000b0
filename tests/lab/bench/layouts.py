"""Layouts of real models for synthetic families: tensors in checkpoint order, and the small files.

No values and no I/O: `family` fills the tensors and writes them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """An architecture, sizes in elements; the embedding is also the head."""

    model_type: str
    layers: int
    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


PRESETS = {
    "tiny": Preset("qwen3", 4, 128, 384, 4, 2, 32, 4096),
    "qwen3-0.6b": Preset("qwen3", 28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-1.7b": Preset("qwen3", 28, 2048, 6144, 16, 8, 128, 151936),
    "llama-3.2-1b": Preset("llama", 16, 2048, 8192, 32, 8, 64, 128256),
    # An embedding of 2³¹ elements, 4 GiB in bfloat16, and the last norm.
    "one-tensor": Preset("llama", 0, 8192, 8192, 64, 8, 128, 262144),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor; layer -1 is the embedding's, and the last norm's is one beyond the blocks'."""

    name: str
    shape: tuple[int, ...]
    layer: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def is_norm(self) -> bool:
        """A vector of scales around 1."""
        return len(self.shape) == 1

    @property
    def is_embedding(self) -> bool:
        """A table of which fine-tuning leaves rows alone."""
        return self.layer < 0


def layout(preset: Preset) -> list[Tensor]:
    """All tensors, in the order of the checkpoint's bytes."""
    hidden, inter, head = preset.hidden, preset.inter, preset.head_dim
    q, kv = preset.heads * head, preset.kv_heads * head
    head_norms = ["k_norm", "q_norm"] if preset.model_type == "qwen3" else []
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, inter),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "post_attention_layernorm": (hidden,),
        **{f"self_attn.{name}": (head,) for name in head_norms},
        "self_attn.k_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_proj": (q, hidden),
        "self_attn.v_proj": (kv, hidden),
    }
    blocks = [
        Tensor(f"model.layers.{layer}.{name}.weight", shape, layer)
        for layer in range(preset.layers)
        for name, shape in shapes.items()
    ]
    embedding = Tensor("model.embed_tokens.weight", (preset.vocab, hidden), -1)
    return [embedding, *blocks, Tensor("model.norm.weight", (hidden,), preset.layers)]


def small_files(preset: Preset) -> dict[str, str]:
    """Config, generation config and a word-level tokenizer of a thousand tokens, by file name."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(997))]
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    files: dict[str, dict[str, Any]] = {
        "config.json": _config(preset),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_added_token(i, word) for i, word in enumerate(words[:3])],
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {word: i for i, word in enumerate(words)},
                "unk_token": "<unk>",
            },
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **special},
        "special_tokens_map.json": special,
    }
    return {name: json.dumps(content, indent=2) for name, content in files.items()}


def _config(preset: Preset) -> dict[str, Any]:
    by_type = {
        "qwen3": {
            "architectures": ["Qwen3ForCausalLM"],
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000,
            "use_sliding_window": False,
        },
        "llama": {
            "architectures": ["LlamaForCausalLM"],
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "mlp_bias": False,
        },
    }
    return by_type[preset.model_type] | {
        "model_type": preset.model_type,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": preset.head_dim,
        "hidden_act": "silu",
        "hidden_size": preset.hidden,
        "intermediate_size": preset.inter,
        "num_attention_heads": preset.heads,
        "num_hidden_layers": preset.layers,
        "num_key_value_heads": preset.kv_heads,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": preset.vocab,
    }


def _added_token(number: int, word: str) -> dict[str, Any]:
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return {"id": number, "content": word, **dict.fromkeys(flags, False), "special": True}
