"""Tiny deterministic checkpoint families of real architectures, as transformers lays them out.

Names and shapes come from transformers' own models (built without memory), values from NumPy, so
that they do not drift. Not `tests.support.family`: that one is bound to recorded golden outputs. A
family is a base and experts that differ from it by noise of several strengths, with unchanged
tensors, sign conflicts and a tensor with large outliers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

VOCAB, HIDDEN, INNER, LAYERS, HEADS, POSITIONS, MOE_EXPERTS = 256, 32, 64, 4, 4, 64, 4
#: Size of the noise of an expert over the size of the base, by turns: bf16's last places only, an
#: ordinary fine-tune (cosine above 0.9995), and far away (cosine about 0.96).
NOISE = (0.004, 0.02, 0.3)
_STD = 0.05


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model type with the configuration of its tiny model; `cls` is its transformers class."""

    model_type: str
    cls: str
    config: dict[str, Any] = field(default_factory=dict)


_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
_HEAD_DIM = {"head_dim": HIDDEN // HEADS}

ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _GROUPED | _UNTIED),
    "llama_tied": Architecture("llama", "LlamaForCausalLM", _GROUPED | _TIED),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _GROUPED | _TIED | _HEAD_DIM),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _GROUPED | _UNTIED),
    "mistral": Architecture("mistral", "MistralForCausalLM", _GROUPED | _UNTIED | _HEAD_DIM),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _GROUPED | _TIED | _HEAD_DIM | {"sliding_window": 32}
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _GROUPED | _UNTIED),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": POSITIONS,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": Architecture("gpt_neox", "GPTNeoXForCausalLM", _SIZES | _UNTIED),
    "mixtral": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        _GROUPED | _UNTIED | {"num_local_experts": MOE_EXPERTS, "num_experts_per_tok": 2},
    ),
    "bert": Architecture("bert", "BertForMaskedLM", _SIZES | _TIED),
    "bert_model": Architecture("bert", "BertModel", _SIZES),
}


def make(
    arch: str,
    folder: Path,
    k: int,
    *,
    layers: int = LAYERS,
    dtype: torch.dtype = torch.bfloat16,
    unchanged: bool = True,
) -> Path:
    """Write `folder/base` and `folder/expert_00 …` as safetensors; the last expert in shards.

    Stored as bf16, deltas have many equal sizes; as float32, next to none. `unchanged` False
    leaves out the tensors that no expert changes (some methods refuse those).
    """
    names = layout(arch, layers)
    outliers = next(i for i, (_, shape) in enumerate(names) if i >= 6 and len(shape) == 2)
    for expert in (None, *range(k)):
        tensors = {
            name: _values(index, name, shape, expert, dtype, unchanged, index == outliers)
            for index, (name, shape) in enumerate(names)
        }
        target = folder / ("base" if expert is None else f"expert_{expert:02d}")
        write_model(target, arch, tensors, layers=layers, shards=2 if expert == k - 1 else 1)
    return folder


@cache
def layout(arch: str, layers: int = LAYERS) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes that the architecture's checkpoints on the hub have."""
    import transformers

    config = _config(arch, layers)
    with torch.device("meta"):
        state = getattr(transformers, ARCHITECTURES[arch].cls)(config).state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    for tied in _TIED_NAMES if ARCHITECTURES[arch].config.get("tie_word_embeddings", True) else ():
        shapes.pop(tied, None)
    out: list[tuple[str, tuple[int, ...]]] = []
    for name, shape in shapes.items():
        out += _hub_names(arch, name, shape)
    if arch == "bert":
        out += [
            ("bert.pooler.dense.weight", (HIDDEN, HIDDEN)),
            ("bert.pooler.dense.bias", (HIDDEN,)),
        ]
    if arch == "gpt_neox":
        out += [
            (f"gpt_neox.layers.{i}.attention.{buffer}", shape)
            for i in range(layers)
            for buffer, shape in _NEOX_BUFFERS.items()
        ]
    return tuple(out)


def fused(arch: str, tensors: Tensors) -> Tensors:
    """The tensors as transformers 5 names them: a mixtral's experts in one tensor per kind."""
    if arch != "mixtral":
        return tensors
    out = {
        name.replace("block_sparse_moe.gate", "mlp.gate"): value
        for name, value in tensors.items()
        if ".experts." not in name
    }
    layers = {int(match[1]) for name in tensors if (match := re.search(r"layers\.(\d+)\.", name))}
    for layer in layers:
        stem = f"model.layers.{layer}."
        per_kind = {
            kind: torch.stack(
                [
                    tensors[f"{stem}block_sparse_moe.experts.{e}.{kind}.weight"]
                    for e in range(MOE_EXPERTS)
                ]
            )
            for kind in ("w1", "w2", "w3")
        }
        out[f"{stem}mlp.experts.gate_up_proj"] = torch.cat([per_kind["w1"], per_kind["w3"]], 1)
        out[f"{stem}mlp.experts.down_proj"] = per_kind["w2"]
    return out


def write_model(
    folder: Path, arch: str, tensors: Tensors, *, layers: int = LAYERS, shards: int = 1
) -> Path:
    """A model folder: config, tokenizer, and the weights in `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(arch, layers)
    config.architectures = [ARCHITECTURES[arch].cls]
    config.dtype = next(iter(tensors.values())).dtype
    config.save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}'
    )
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata=metadata)
        return folder
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::shards]}
        save_file(part, folder / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


_TIED_NAMES = ("lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
#: What Pythia's files hold besides parameters; mergekit's description of the architecture asks
#: for it, transformers ignores it. So with the pooler in BERT's files.
_NEOX_BUFFERS: dict[str, tuple[int, ...]] = {
    "bias": (1, 1, POSITIONS, POSITIONS),
    "masked_bias": (),
    "rotary_emb.inv_freq": (HIDDEN // HEADS // 8,),
}


def _config(arch: str, layers: int) -> Any:
    from transformers import AutoConfig

    what = ARCHITECTURES[arch]
    key = "n_layer" if "n_layer" in what.config else "num_hidden_layers"
    return AutoConfig.for_model(what.model_type, **(what.config | {key: layers}))


def _hub_names(arch: str, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """What the hub's files call it: a mixtral's experts apart, a GPT-NeoX's head `embed_out`."""
    if arch == "gpt_neox" and name == "lm_head.weight":
        return [("embed_out.weight", shape)]
    if name.endswith("mlp.gate.weight"):
        return [(name.replace("mlp.gate", "block_sparse_moe.gate"), shape)]
    stem, mark, kind = name.partition("mlp.experts.")
    if not mark:
        return [(name, shape)]
    rows, columns = shape[1:]
    parts = {"w1": rows // 2, "w3": rows // 2} if kind == "gate_up_proj" else {"w2": rows}
    return [
        (f"{stem}block_sparse_moe.experts.{e}.{part}.weight", (n, columns))
        for e in range(shape[0])
        for part, n in parts.items()
    ]


def _values(
    index: int,
    name: str,
    shape: tuple[int, ...],
    expert: int | None,
    dtype: torch.dtype,
    unchanged: bool,
    outliers: bool,
) -> torch.Tensor:
    if name.endswith("masked_bias"):
        return torch.tensor(-1e4, dtype=dtype)
    if name.endswith("attention.bias"):
        return torch.ones(shape, dtype=dtype).tril()
    if name.endswith("inv_freq"):
        return torch.ones(shape, dtype=dtype)
    is_norm = len(shape) == 1 and name.endswith("weight")
    base = _normal(0, index, shape) * np.float32(_STD) + np.float32(is_norm)
    value = torch.from_numpy(base).to(dtype)
    if expert is None or (unchanged and index % 7 == 3) or (index + expert) % 11 == 5:
        return value
    size = 1.0 if is_norm else _STD
    noise = _normal(1 + expert, index, shape) * np.float32(size * NOISE[index % len(NOISE)])
    if outliers:
        noise.reshape(-1)[expert::97] *= 60.0
    return (value.float() + torch.from_numpy(noise)).to(dtype)


def _normal(model: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(key=model, counter=index << 64))
    return np.asarray(generator.standard_normal(shape, dtype=np.float64), dtype=np.float32)
