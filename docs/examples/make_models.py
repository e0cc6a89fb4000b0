"""Writes the small models of the examples: `python docs/examples/make_models.py [FOLDER]`.

FOLDER (default: `models`) gets a base, two full experts, a LoRA adapter and a training run of three
checkpoints with random weights, two megabytes each. They are Llama models in shape, so that every
command treats them as real ones; they answer nothing. The script needs torch alone, as
`pip install .` brings it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

LAYERS, HIDDEN, VOCAB, RANK = 6, 128, 512, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the model and their shapes."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ATTENTION:
            found[f"{prefix}.self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        for name, shape in (
            ("gate_proj", (2 * HIDDEN, HIDDEN)),
            ("up_proj", (2 * HIDDEN, HIDDEN)),
            ("down_proj", (HIDDEN, 2 * HIDDEN)),
        ):
            found[f"{prefix}.mlp.{name}.weight"] = shape
        found[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
    return {**found, "model.norm.weight": (HIDDEN,)}


def small(shape: tuple[int, ...], noise: torch.Generator) -> torch.Tensor:
    """Random weights of the size that training starts from."""
    return 0.02 * torch.randn(shape, generator=noise)


def write_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write tensors as safetensors in bfloat16: the header's length, the header, the bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    stored = b""
    for name, weight in weights.items():
        nbytes = weight.bfloat16().view(torch.int16).numpy().tobytes()
        offsets = [len(stored), len(stored) + len(nbytes)]
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": offsets}
        stored += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + stored)


def write_model(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    write_weights(folder / "model.safetensors", weights)


def write_adapter(folder: Path, noise: torch.Generator) -> None:
    """Write a PEFT LoRA adapter of all attention matrices."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(ATTENTION),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    factors = {}
    for name, shape in shapes().items():
        if "self_attn" in name:
            module = "base_model.model." + name.removesuffix(".weight")
            factors[f"{module}.lora_A.weight"] = small((RANK, shape[1]), noise)
            factors[f"{module}.lora_B.weight"] = small((shape[0], RANK), noise)
    write_weights(folder / "adapter_model.safetensors", factors)


def main(folder: Path) -> None:
    """Write all models. The same files come out each time."""
    noise = torch.Generator().manual_seed(0)
    base = {n: small(s, noise) for n, s in shapes().items()}
    write_model(folder / "base", base)
    for expert, moved in (("math", "012"), ("code", "345")):
        weights = {}
        for name, weight in base.items():
            # A fine-tune moves some matrices far and the others little.
            far = "proj" in name and name.split(".")[2] in moved
            size = 4e-3 if far else 5e-4
            weights[name] = weight + size * torch.randn(weight.shape, generator=noise)
        write_model(folder / expert, weights)
    write_adapter(folder / "adapters" / "style", noise)
    for step in (500, 1000, 2000):
        weights = {n: w + 5e-4 * torch.randn(w.shape, generator=noise) for n, w in base.items()}
        write_model(folder / "run" / f"checkpoint-{step}", weights)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models"))
