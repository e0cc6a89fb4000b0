"""Tiny models with vocabularies of their own, for mergekit's record and for our tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

#: Names of a tiny llama's matrices whose rows are tokens.
SIDES = ("model.embed_tokens.weight", "lm_head.weight")
K = 5
METHODS = {"nearest": "common_interpolation", "omp": "omp"}
_STEP = {"add_prefix_space": False, "trim_offsets": False, "use_regex": True}
BYTE_LEVEL = {"type": "ByteLevel", **_STEP}
_NORMS = ("input_layernorm", "post_attention_layernorm")


def words(specials: Sequence[str], numbers: Sequence[int]) -> dict[str, int]:
    """A vocabulary of special tokens and numbered words."""
    return {w: i for i, w in enumerate([*specials, *(f"w{n}" for n in numbers)])}


def write(
    folder: Path,
    vocab: Mapping[str, int],
    parts: Mapping[str, str],
    *,
    hidden: int,
    tied: bool,
    seed: int,
    step: Mapping[str, Any] | None = None,
) -> Path:
    """A llama of one layer in float32; `parts` are its special tokens, `step` its pre-tokenizer."""
    from transformers import LlamaConfig

    folder.mkdir(parents=True)
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    ids |= {f"{part}_id": vocab[token] for part, token in parts.items() if part != "unk_token"}
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(vocab),
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        dtype="float32",
        **ids,
    ).save_pretrained(folder)
    rng, layer = np.random.default_rng(seed), "model.layers.0."
    squares = [f"self_attn.{x}_proj" for x in "qkvo"]
    squares += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    shapes: dict[str, tuple[int, ...]] = {f"{layer}{s}.weight": (hidden, hidden) for s in squares}
    shapes |= {f"{layer}{norm}.weight": (hidden,) for norm in _NORMS}
    shapes |= {"model.norm.weight": (hidden,)}
    shapes |= {side: (len(vocab), hidden) for side in SIDES[: 1 if tied else 2]}
    values = {n: rng.standard_normal(s).astype(np.float32) / 20 for n, s in sorted(shapes.items())}
    tensors = {n: torch.from_numpy(v) for n, v in values.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added: list[dict[str, Any]] = [
        {"id": vocab[t], "content": t, "special": True} | flags for t in parts.values()
    ]
    kind = {"type": "BPE", "merges": []} if step else {"type": "WordLevel"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": sorted(added, key=lambda t: t["id"]),
        "pre_tokenizer": step or {"type": "Whitespace"},
        "model": kind | {"vocab": vocab, "unk_token": parts.get("unk_token")},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **parts}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def pair(folder: Path, *, tied: bool) -> tuple[Path, Path]:
    """A recipient and a donor of another width; most words are in both."""
    own = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    theirs = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<|end|>"}
    ours, others = words([*own.values()], range(40)), words([*theirs.values()], range(48, 8, -1))
    recipient = write(folder / "recipient", ours, own, hidden=16, tied=tied, seed=1)
    return recipient, write(folder / "donor", others, theirs, hidden=12, tied=tied, seed=2)


def new_tokens(recipient: Path, donor: Path) -> dict[str, int]:
    """The donor's tokens that only it has, with their ids."""
    ours, theirs = (_vocab(folder) for folder in (recipient, donor))
    return {t: i for t, i in theirs.items() if t not in ours and t != "<|end|>"}


def _vocab(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return found
