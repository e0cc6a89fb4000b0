"""A small deterministic checkpoint family for tests, in real Hugging Face layout.

Not the benchmark generator: a few hundred thousand parameters, NumPy randomness only (so that
recorded golden outputs stay valid), tied embeddings, half of the embedding rows of each expert
unchanged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from safetensors.torch import save_file


class Size(TypedDict):
    """How large a family's model is, as `tensors_of` and `write_model` are told it."""

    layers: int
    hidden: int
    vocab: int


def layout(layers: int, hidden: int, vocab: int) -> list[tuple[str, tuple[int, ...]]]:
    """Tensor names and shapes of a tiny llama."""
    inter = 2 * hidden
    out: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab, hidden))]
    for i in range(layers):
        p = f"model.layers.{i}."
        out += [
            (p + "input_layernorm.weight", (hidden,)),
            (p + "mlp.down_proj.weight", (hidden, inter)),
            (p + "mlp.gate_proj.weight", (inter, hidden)),
            (p + "mlp.up_proj.weight", (inter, hidden)),
            (p + "post_attention_layernorm.weight", (hidden,)),
            (p + "self_attn.k_proj.weight", (hidden, hidden)),
            (p + "self_attn.o_proj.weight", (hidden, hidden)),
            (p + "self_attn.q_proj.weight", (hidden, hidden)),
            (p + "self_attn.v_proj.weight", (hidden, hidden)),
        ]
    return [*out, ("model.norm.weight", (hidden,))]


def tensors_of(
    seed: int,
    expert: int | None,
    *,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 512,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, torch.Tensor]:
    """The base's tensors (`expert` None), or an expert's: the base plus a small perturbation."""
    out = {}
    for index, (name, shape) in enumerate(layout(layers, hidden, vocab)):
        base = _normal((seed, 0, index), shape) * 0.02 + (1.0 if len(shape) == 1 else 0.0)
        value = torch.from_numpy(base).to(dtype)
        if expert is not None:
            scale = 0.004 if len(shape) == 1 else 0.0008 * (1 + expert % 3) * (1 + index % 2)
            delta = _normal((seed, 1 + expert, index), shape) * scale
            if "embed" in name:
                delta[expert % 2 :: 2] = 0.0
            value = (value.float() + torch.from_numpy(delta.astype(np.float32))).to(dtype)
        out[name] = value
    return out


def write_model(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    *,
    shards: int = 1,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 512,
) -> Path:
    """A model folder with config, generation config, tokenizer and weights in `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}'
    )
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    size = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[i * size : (i + 1) * size]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_adapter(folder: Path, seed: int, hidden: int = 64, rank: int = 4) -> Path:
    """A PEFT LoRA adapter for the first layer's q_proj."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    shapes = {f"{name}A.weight": (rank, hidden), f"{name}B.weight": (hidden, rank)}
    factors = {
        n: torch.from_numpy(0.01 * _normal((seed, 900, i), shape))
        for i, (n, shape) in enumerate(shapes.items())
    }
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


def make_family(folder: Path, k: int = 4, seed: int = 0) -> Path:
    """`folder/base` and `folder/expert_00 …`; expert 1 is in two shards."""
    write_model(folder / "base", tensors_of(seed, None))
    for e in range(k):
        write_model(folder / f"expert_{e:02d}", tensors_of(seed, e), shards=2 if e == 1 else 1)
    return folder


def _normal(key: tuple[int, int, int], shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.Generator(
        np.random.Philox(key=key[0] * 1_000_003 + key[1], counter=key[2] << 64)
    )
    return generator.standard_normal(shape, dtype=np.float64).astype(np.float32)
