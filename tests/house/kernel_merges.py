"""Merges and packs of a tiny family by every kind of kernel."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mergepipe_pipeline.bfloat16 import nearest
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.warehouse import Warehouse

_HIDDEN, _VOCABULARY = 32, 96
#: Large enough for leading directions; experts differ in two of them.
_LARGE = "model.layers.0.mlp.up_proj.weight"
_SHAPES = {
    "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
    "model.layers.0.input_layernorm.weight": (_HIDDEN,),
    "model.layers.0.mlp.down_proj.weight": (_HIDDEN, 2 * _HIDDEN),
    _LARGE: (256, 256),
    "model.layers.0.self_attn.q_proj.weight": (_HIDDEN, _HIDDEN),
    "model.norm.weight": (_HIDDEN,),
}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 1,
    "vocab_size": _VOCABULARY,
}
#: Methods and their parameters: one of each kind of kernel; each once more under a budget.
_RECIPES = (
    ("dare_ties", "{density: 0.5}"),
    ("dare_linear", "{density: 0.5, rescale: true}"),
    ("della", "{density: 0.5, epsilon: 0.1}"),
    ("breadcrumbs", "{density: 0.5, gamma: 0.1}"),
    ("task_arithmetic", "{}"),
    ("linear", "{}"),
    ("mean", "{}"),
    ("ties", "{density: 0.3}"),
    ("ties", "{density: 0.2}"),
)


def merge_all(folder: Path) -> None:
    """Merge and pack a tiny family in a folder, in every way that has kernels of its own."""
    for dtype in ("BF16", "F32"):
        base, *experts = (folder / dtype / f"model_{n}" for n in range(4))
        for seed, model in enumerate((base, *experts)):
            _write_model(model, seed, dtype)
        home = Warehouse.at(folder / f"warehouse-{dtype}").ensure()
        models = "".join(f"- {{model: {m}, parameters: {{weight: 0.5}}}}\n" for m in experts)
        for is_packed in (False, True):
            for method, parameters in _RECIPES:
                path = folder / "recipe.yml"
                path.write_text(
                    f"merge_method: {method}\nbase_model: {base}\ndtype: bfloat16\n"
                    f"parameters: {parameters}\nmodels:\n{models}"
                )
                merge(home, path, fresh=is_packed)
                for budget in ("40%", *(("2%", "8%") if is_packed else ())):
                    merge(home, path, budget=budget)
            if not is_packed:
                pack(home, [str(m) for m in experts], base=str(base))


def _write_model(folder: Path, seed: int, dtype: str) -> None:
    """A checkpoint of random weights: the base for seed 0, else one near it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    header, parts, at = dict[str, object](), list[bytes](), 0
    for number, (name, shape) in enumerate(_SHAPES.items()):
        values = np.random.default_rng(number).normal(0, 0.02, shape)
        for common in (0, seed) if seed else ():  # experts agree in part
            drawn = np.random.default_rng((number, 1, common))
            of_all = drawn.normal(0, 0.002, shape)
            directions = drawn.normal(0, 0.05, (2, *shape))
            values += directions[0, :, :2] @ directions[1, :2] if name == _LARGE else of_all
        bits = values.astype(np.float32).view(np.uint32)
        data = (nearest(bits).astype(np.uint16) if dtype == "BF16" else bits).tobytes()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(parts)
    )
