"""Tiny families and configurations of mixtures, for mergekit's record and for our tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import torch
import yaml
from safetensors.torch import load_file

from tests.support import architectures
from tests.support.architectures import Architecture

LAYERS = 2
_QWEN2 = Architecture("qwen2", "Qwen2ForCausalLM", architectures._GROUPED | architectures._UNTIED)
FAMILIES = ("mistral", "qwen3", "qwen2")
#: What tokenizers put around a text themselves, and whether they name a `bos_token`.
TOKENIZERS = {
    "no bos added": ("A", True),
    "eos added": ("A </s>", True),
    "both added": ("<s> A </s>", True),
    "no bos": ("A", False),
    "bos added, not named": ("<s> A", False),
}
MODES = ("hidden", "cheap_embed", "random")


def make_family(folder: Path, arch: str) -> Path:
    """A base and two experts in float32, whose tokenizer has a token per byte."""
    with patch.dict(architectures.ARCHITECTURES, qwen2=_QWEN2):
        architectures.make(arch, folder, 2, layers=LAYERS, dtype=torch.float32)
    for model in folder.iterdir():
        write_tokenizer(model)
    return folder


def write_tokenizer(model: Path, around: str = "<s> A", has_bos: bool = True) -> None:
    """A byte-level tokenizer that puts `<s>` before a text `A`, or what else `around` says."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ"]
    specials = ["<unk>", "<s>", "</s>"]
    flags = {"add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    byte_level = {"type": "ByteLevel", **flags}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for i, text in enumerate(specials)
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"Sequence" if x == "A" else "SpecialToken": {"id": x, "type_id": 0}}
                for x in around.split()
            ],
            "pair": [{"Sequence": {"id": x, "type_id": i}} for i, x in enumerate("AB")],
            "special_tokens": {
                x: {"id": x, "ids": [specials.index(x)], "tokens": [x]} for x in ("<s>", "</s>")
            },
        },
        "model": {
            "type": "BPE",
            "vocab": {text: i for i, text in enumerate([*specials, *letters])},
            "merges": [],
        },
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    config |= {"bos_token": "<s>"} if has_bos else {}
    config |= {"eos_token": "</s>", "pad_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))


def write_config(family: Path, arch: str, mode: str) -> Path:
    """The file that asks for a mixture of the family; a qwen2 one has a shared expert."""
    prompts: Mapping[str, object] = {
        "positive_prompts": ["one prompt", "and a longer one"],
        "negative_prompts": ["another"],
    }
    config = {
        "base_model": str(family / "base"),
        "gate_mode": mode,
        "dtype": "float32",
        "experts": [
            {"source_model": str(family / "expert_00"), **prompts},
            {"source_model": str(family / "expert_01"), "positive_prompts": ["the last"]},
        ],
    }
    if arch == "qwen2":
        shared = {"source_model": str(family / "base"), "residual_scale": 0.3}
        config["shared_experts"] = [shared | {"positive_prompts": ["for all"]}]
    path = family.parent / f"{arch}-{mode}.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def read(folder: Path | str) -> dict[str, torch.Tensor]:
    """The tensors of a folder."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def is_gate(name: str) -> bool:
    """Whether a tensor routes tokens."""
    return name.endswith((".gate.weight", "shared_expert_gate.weight"))


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under one set of names: each expert's matrices apart, as in Qwen's files."""
    found = {}
    for name, value in tensors.items():
        stem, mark, kind = name.partition("mlp.experts.")
        if mark and kind == "gate_up_proj":
            for e, both in enumerate(value):
                for part, rows in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    found[f"{stem}{mark}{e}.{part}.weight"] = rows
        elif mark and kind == "down_proj":
            found |= {f"{stem}{mark}{e}.down_proj.weight": rows for e, rows in enumerate(value)}
        else:
            for old, new in _MIXTRAL.items():
                name = name.replace(old, new)
            found[name] = value
    return found


_MIXTRAL = {
    "block_sparse_moe": "mlp",
    ".w1.weight": ".gate_proj.weight",
    ".w2.weight": ".down_proj.weight",
    ".w3.weight": ".up_proj.weight",
}


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of all names and bytes but the gates'."""
    found = hashlib.sha256()
    for name in sorted(n for n in tensors if not is_gate(n)):
        found.update(name.encode())
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
