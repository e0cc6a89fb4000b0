"""An evaluator of the demo's models: `python front_score.py QUESTIONS SNAPSHOT` prints metrics.

It generates greedily with a Llama written out in torch, since importing transformers would take
longer than all answers. QUESTIONS is a file of safetensors: of each skill prompts and right answers
[n, tokens]; `stop` [1] is the token that ends an answer, `most` [1] the tokens that one may take.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

Weights = dict[str, Tensor]


def score(questions: Path, folder: Path) -> dict[str, float]:
    """Shares of right answers by skill, and `tokens`, which an answer has on average.

    An answer ends with its first stop; it is right if what stands before that, after all working,
    is. One that does not end costs the most.
    """
    torch.set_num_threads(1)
    asked = load_file(questions)
    stop, most = int(asked.pop("stop")), int(asked.pop("most"))
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name.removeprefix("model."): w.float()
        for file in sorted(folder.glob("*.safetensors"))
        for name, w in load_file(file).items()
    }
    shares, lengths = {}, []
    for skill in sorted({name.partition(".")[0] for name in asked}):
        said = generated(config, weights, asked[f"{skill}.prompts"], stop, most)
        right, n_tokens = judged(said, asked[f"{skill}.answers"], stop)
        shares[skill] = right.double().mean().item()
        lengths.append(n_tokens.double().mean().item())
    return {**shares, "tokens": sum(lengths) / len(lengths)}


def judged(said: Tensor, answers: Tensor, stop: int) -> tuple[Tensor, Tensor]:
    """Which of the texts [n, tokens] end with their answers [n, letters], and their lengths."""
    count, letters = said.shape[1], answers.shape[1]
    stops = said == stop
    lengths = torch.where(stops.any(1), stops.int().argmax(1) + 1, count)
    places = (lengths[:, None] - 1 - letters + torch.arange(letters)).clamp(min=0)
    right = (said.gather(1, places) == answers).all(1) & stops.any(1) & (lengths > letters)
    return right, lengths


@torch.no_grad()
def generated(
    config: dict[str, Any], weights: Weights, prompts: Tensor, stop: int, most: int
) -> Tensor:
    """The next tokens of each prompt [n, tokens], each the likeliest, until all have stopped.

    `most` tokens at most.
    """
    known: list[tuple[Tensor, Tensor]] = []
    told, found = prompts, list[Tensor]()
    has_ended = torch.zeros(len(prompts), 1, dtype=torch.bool)
    while len(found) < most and not has_ended.all():
        told = _logits(config, weights, told, known)[:, -1].argmax(-1, keepdim=True)
        has_ended |= told == stop
        found.append(told)
    return torch.cat(found, 1)


def _logits(
    config: dict[str, Any], weights: Weights, ids: Tensor, known: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Logits [n, tokens, vocabulary]; `known` are keys and values of all tokens before."""
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    hidden = embedding(ids, weights["embed_tokens.weight"])
    n, count, width = hidden.shape
    first = known[0][0].shape[2] if known else 0
    shape = n, count, heads, width // heads
    for layer in range(config["num_hidden_layers"]):
        w = {
            name.removeprefix(f"layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        normal = rms_norm(hidden, (width,), w["input_layernorm.weight"], eps)
        query, key, value = (
            linear(normal, w[f"self_attn.{x}_proj.weight"]).view(shape).transpose(1, 2)
            for x in "qkv"
        )
        query, key = (_turned(x, first, _theta(config)) for x in (query, key))
        if first:
            before = known[layer]
            key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
            known[layer] = key, value
        else:
            known.append((key, value))
        seen = scaled_dot_product_attention(query, key, value, is_causal=not first)
        seen = seen.transpose(1, 2).reshape(n, count, width)
        hidden = hidden + linear(seen, w["self_attn.o_proj.weight"])
        normal = rms_norm(hidden, (width,), w["post_attention_layernorm.weight"], eps)
        gate, up = (linear(normal, w[f"mlp.{x}_proj.weight"]) for x in ("gate", "up"))
        hidden = hidden + linear(silu(gate) * up, w["mlp.down_proj.weight"])
    return linear(rms_norm(hidden, (width,), weights["norm.weight"], eps), _head(weights))


def _head(weights: Weights) -> Tensor:
    return weights.get("lm_head.weight", weights["embed_tokens.weight"])


def _theta(config: dict[str, Any]) -> float:
    """The base of rotary angles, wherever this version of transformers has put it."""
    return float((config.get("rope_parameters") or config).get("rope_theta", 10_000.0))


def _turned(x: Tensor, first: int, theta: float) -> Tensor:
    """Rotary positions from `first` on, for queries or keys [n, heads, tokens, width]."""
    tokens, width = x.shape[-2:]
    rates = theta ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(first, first + tokens), rates).repeat(1, 2)
    half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * angles.cos() + half * angles.sin()


if __name__ == "__main__":
    print(json.dumps(score(Path(sys.argv[1]), Path(sys.argv[2]))))
