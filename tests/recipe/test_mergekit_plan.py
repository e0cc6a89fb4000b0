"""The same tensors, positions and parameters as the installed mergekit plans, without a merge."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.recipe.model_tensors import ModelTable
from mergepipe_pipeline.recipe.parse import parse_recipes, resolve_recipe
from tests.recipe import mergekit_plan
from tests.recipe.schemas import METHODS, Table

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(
        importlib.util.find_spec("mergekit") is None, reason="mergekit is not installed (.[peer])"
    ),
]

N_LAYERS = 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": N_LAYERS,
    "hidden_size": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 4,
    "vocab_size": 4,
}
VECTORS = ("input_layernorm", "post_attention_layernorm")
MATRICES = tuple(f"mlp.{p}_proj" for p in ("down", "gate", "up")) + tuple(
    f"self_attn.{p}_proj" for p in "koqv"
)
RECIPES = {
    "slerp_of_shifted_slices": """\
merge_method: slerp
base_model: {a}
slices:
- sources:
  - {model: {a}, layer_range: [0, 3]}
  - {model: {b}, layer_range: [1, 4]}
- sources:
  - {model: {a}, layer_range: [3, 4]}
  - {model: {c}, layer_range: [0, 1]}
  parameters: {t: [{filter: mlp, value: [0.2, 0.4]}]}
parameters: {t: [{filter: '.1.', value: 0.9}, {value: [0, 1]}]}
""",
    "stacked_twice": """\
merge_method: passthrough
slices:
- sources:
  - model: {a}
    layer_range: [0, 3]
    parameters: {scale: [{filter: '.2.', value: 0}, {value: 2}]}
- sources: [{model: {b}, layer_range: [1, 4]}]
- sources: [{model: {a}, layer_range: [2, 4]}]
parameters: {scale: 1}
""",
    "ties_with_every_form": """\
merge_method: ties
base_model: {base}
models:
- model: {a}
  parameters:
    density: [1, 0.7, 0.1]
    weight: [{filter: mlp, value: [0.5, 1]}, {filter: '*', value: "0.25"}]
- model: {b}
  parameters: {weight: [0, 0.3, 0.7, 1]}
- model: {base}
parameters:
  density: 0.5
  normalize: [{filter: lm_head, value: false}, {value: [false, true]}]
  lambda: [1, 2]
""",
    "linear_of_two_slices": """\
merge_method: linear
slices:
- sources:
  - {model: {a}, layer_range: [0, 2], parameters: {weight: [0.1, 0.9]}}
  - {model: {b}, layer_range: [2, 4]}
  parameters: {weight: 0.5}
- sources:
  - {model: {b}, layer_range: [0, 1]}
  - {model: {c}, layer_range: [1, 2], parameters: {weight: [0.3, 0.8]}}
parameters: {weight: [{filter: norm, value: 3}, {value: [1, 5]}]}
""",
    "task_arithmetic_with_a_base_per_slice": """\
merge_method: task_arithmetic
base_model: {base}
slices:
- sources:
  - {model: {base}, layer_range: [0, 2]}
  - {model: {a}, layer_range: [0, 2]}
- base_model: {b}
  sources:
  - {model: {c}, layer_range: [1, 4]}
  - {model: {b}, layer_range: [0, 3]}
parameters: {weight: [0, 1], lambda: [{filter: embed, value: 7}, {value: 0.5}]}
""",
    "karcher_of_three": """\
merge_method: karcher
models: [{model: {a}}, {model: {b}}, {model: {c}}]
parameters: {max_iter: [2, 5], tol: 1e-3}
""",
}


def _make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    square, vector = np.zeros((4, 4), np.float32), np.zeros(4, np.float32)
    tensors: dict[str, np.ndarray[Any, Any]] = {"model.embed_tokens.weight": square}
    for k in range(N_LAYERS):
        tensors |= {f"model.layers.{k}.{part}.weight": vector for part in VECTORS}
        tensors |= {f"model.layers.{k}.{part}.weight": square for part in MATRICES}
    save_file(
        tensors | {"model.norm.weight": vector, "lm_head.weight": square},
        folder / "model.safetensors",
    )
    return folder


def _table() -> Table:
    shapes = {"model.embed_tokens": (4, 4), "model.norm": (4,), "lm_head": (4, 4)}
    for k in range(N_LAYERS):
        shapes |= {f"model.layers.{k}.{part}": (4,) for part in VECTORS}
        shapes |= {f"model.layers.{k}.{part}": (4, 4) for part in MATRICES}
    names = {f"{n}.weight": shape for n, shape in shapes.items()}
    return {n: TensorEntry(n, "F32", shape, "model.safetensors", 0) for n, shape in names.items()}


def _filled(text: str, models: dict[str, Path]) -> str:
    for name, folder in models.items():
        text = text.replace(f"{{{name}}}", str(folder))
    return text


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: _make(root / name) for name in ("base", "a", "b", "c")}


@pytest.fixture(scope="module")
def plans(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Every recipe as mergekit plans it, from one process."""
    files = []
    for name, text in RECIPES.items():
        files.append(models["base"].parent / f"{name}.yml")
        files[-1].write_text(_filled(text, models))
    done = subprocess.run(
        [sys.executable, mergekit_plan.__file__, *files],
        check=True,
        capture_output=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=120,
    )
    return dict(zip(RECIPES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_each_tensor_is_made_of_what_mergekit_makes_it_of(
    name: str, models: dict[str, Path], plans: dict[str, dict[str, Any]]
) -> None:
    text = _filled(RECIPES[name], models)
    raw = parse_recipes(text, name=name, where=name, methods=METHODS)[-1]
    recipe = resolve_recipe(raw, [ModelTable(ref, _table()) for ref in raw.references])
    folder = [Path(ref.text).name for ref in recipe.models]
    plan = plans[name]
    assert {t.name for t in recipe.tensors} == set(plan)
    for t in recipe.tensors:
        theirs = plan[t.name]
        uses_base = METHODS[recipe.method].base != "none"
        ours = {folder[i.model]: (i.tensor, dict(i.params)) for i in t.inputs}
        if uses_base and t.base is not None:
            assert folder[t.base.model] == theirs["base"]
            ours[folder[t.base.model]] = (t.base.tensor, {})
        assert {m: n for m, (n, _) in ours.items()} == {
            m: n for m, (n, _) in theirs["inputs"].items()
        }
        for key, value in dict(t.params).items():
            if key in theirs["params"]:
                assert value == pytest.approx(theirs["params"][key]), (t.name, key)
        for model, (_, params) in ours.items():
            for key, value in params.items():
                assert value == pytest.approx(theirs["inputs"][model][1][key]), (t.name, key)
