"""Tiny models of the architectures that GGUF files are converted of, and their files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tools.ggufs import Vocabulary, byte_level, llama3_factors, pieces, write

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
_LONG = [1.0 + i / 4 for i in range(4)]
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@cache
def model_of(model_type: str, n_tokens: int, **values: Any) -> Any:
    """A model of random weights; norms too, and nothing is what it begins with."""
    sizes = {
        "vocab_size": n_tokens,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    decoded = {
        k: json.loads(v) if isinstance(v, str) and v[0] in "{[" else v for k, v in values.items()
    }
    config = AutoConfig.for_model(model_type, **{**sizes, **decoded})
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def state_of(model: Any) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


def rope(**values: Any) -> str:
    """Rotary parameters as text: what a cached function can take."""
    return json.dumps({"rope_theta": 10000.0, **values}, sort_keys=True)


#: By name: architecture, model type, the config's values, the file's other keys; whether
#: transformers reads all of that from the file.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], bool]] = {
    "llama": ("llama", "llama", {}, {"rope.dimension_count": 8}, True),
    "llama, tied, sizes of heads by default": (
        "llama",
        "llama",
        {"tie_word_embeddings": True},
        {"attention.key_length": None, "attention.value_length": None, "vocab_size": None},
        True,
    ),
    "llama with biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}, False),
    "llama 3.1": (
        "llama",
        "llama",
        {
            "rope_parameters": rope(
                rope_theta=500000.0,
                rope_type="llama3",
                original_max_position_embeddings=8192,
                **_LLAMA3,
            )
        },
        {},
        False,
    ),
    "llama, stretched": (
        "llama",
        "llama",
        {"rope_parameters": rope(rope_type="linear", factor=4.0)},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        False,
    ),
    "mistral": ("llama", "mistral", {"head_dim": 16, "sliding_window": None}, {}, False),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}, {"rope.freq_base": 1e4}, True),
    "qwen2, stretched": (
        "qwen2",
        "qwen2",
        {
            "rope_parameters": rope(
                rope_type="yarn", factor=4.0, original_max_position_embeddings=64
            )
        },
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        False,
    ),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 128}, {}, True),
    "qwen3 with small heads": ("qwen3", "qwen3", {"head_dim": 16}, {}, False),
    "gemma": ("gemma", "gemma", {"head_dim": 16}, {"rope.freq_base": None}, False),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"head_dim": 256, "sliding_window": 8},
        {
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        True,
    ),
    "gemma2 of another scale": (
        "gemma2",
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "final_logit_softcapping": 5.0,
        },
        {"attention.sliding_window": 8, "final_logit_softcapping": 5.0},
        False,
    ),
    "gemma2 of 46 layers": (
        "gemma2",
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 8, "num_hidden_layers": 46},
        {},
        False,
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {"head_dim": 256, "sliding_window": 8, "num_hidden_layers": 7},
        {"attention.sliding_window": 8},
        True,
    ),
    "gemma3, stretched": (
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "num_hidden_layers": 6,
            "rope_parameters": json.dumps(
                {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": _DEFAULT,
                }
            ),
        },
        {
            "attention.sliding_window": 8,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "rope.freq_base_swa": 1e4,
        },
        False,
    ),
    "phi3": ("phi3", "phi3", {}, {"rope.dimension_count": 8, "attention.sliding_window": 0}, True),
    "phi3 for long texts": (
        "phi3",
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "sliding_window": 20,
            "rope_parameters": rope(
                rope_type="longrope",
                original_max_position_embeddings=64,
                short_factor=[1.0] * 4,
                long_factor=_LONG,
                attention_factor=1.25,
            ),
        },
        {
            "rope.dimension_count": 8,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.25,
            "attention.sliding_window": 20,
        },
        False,
    ),
}
#: Tensors that say how the rotary embedding is stretched.
FACTORS = {
    "llama 3.1": {"rope_freqs.weight": llama3_factors(500000.0, 8, 8.0, 8192)},
    "phi3 for long texts": {
        "rope_factors_long.weight": np.array(_LONG, np.float32),
        "rope_factors_short.weight": np.ones(4, np.float32),
    },
}


def vocabulary_of(architecture: str) -> Vocabulary:
    if architecture.startswith("qwen"):
        return byte_level("qwen2")
    return pieces(gemma=architecture.startswith("gemma"))


def written(path: Path, name: str, **changes: Any) -> tuple[Path, Any]:
    """The file of one of `MODELS`, and the model that it is."""
    architecture, model_type, values, keys, _ = MODELS[name]
    vocabulary = vocabulary_of(architecture)
    ids = {k: vocabulary.settings.get(k) for k in ("bos_token_id", "eos_token_id")}
    model = model_of(model_type, len(vocabulary.tokens), **{**ids, **values})
    keys = {**keys, **changes.pop("keys", {})}
    arguments = {"keys": keys, "extra": FACTORS.get(name), **changes}
    return write(path, architecture, model, vocabulary, **arguments), model
