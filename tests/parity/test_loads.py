"""Merged models load in transformers without a missing tensor and compute what they should.

The model to compare with is assembled here, tensor by tensor, or by mergekit.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.conftest import FamilyOf
from tests.parity.peer import read_model, run_mergekit
from tests.parity.recipes import RECIPES, SUFFIX, fill
from tests.parity.refusals import UP_SCALE
from tests.support.architectures import ARCHITECTURES, LAYERS, VOCAB, Tensors, make, write_model

pytest.importorskip("transformers")
CAUSAL = [arch for arch in ARCHITECTURES if not arch.startswith("bert")]
#: Prefix of layers, by the first component of a tensor's name.
LAYER_PREFIX = {"gpt2": "transformer.h.", "gpt_neox": "gpt_neox.layers."}


def logits(folder: Path) -> torch.Tensor:
    """What the model in `folder` makes of a fixed text, in float32; float32 [2, 12, n].

    Raises AssertionError if a tensor of the model is not in the files.
    """
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls: Any = getattr(
            transformers, json.loads((folder / "config.json").read_text())["architectures"][0]
        )
        model, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]
        tokens = torch.arange(24).reshape(2, 12) * 7 % VOCAB
        with torch.no_grad():
            out: torch.Tensor = model.eval()(input_ids=tokens)[0]
    return out


def merged(home: Warehouse, text: str) -> Path:
    """The folder of our merge of recipe text."""
    return Path(run(home, text).snapshot.path)


def assembled(folder: Path, arch: str, tensors: Tensors, layers: int = LAYERS) -> Path:
    """A model folder of tensors made here, in bfloat16."""
    rounded = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    return write_model(folder, arch, rounded, layers=layers)


def assert_same_logits(ours: Path, other: Path, *, rtol: float = 0.02) -> None:
    """Logits of both models are equal up to rare roundings of weights, and are not all alike."""
    a, b = logits(ours), logits(other)
    assert float(b.std()) > 0
    assert bool(a.isfinite().all())
    assert float((a - b).abs().max()) <= rtol * float(b.std())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_linear_merge_computes_what_the_combined_weights_compute(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path, arch: str
) -> None:
    family = family_of(arch)
    text = fill(
        "merge_method: linear\nmodels:\n"
        "  - {model: $e0, parameters: {weight: 0.75}}\n"
        "  - {model: $e2, parameters: {weight: 0.25}}\n",
        family,
    )
    first, second = read_model(family / "expert_00"), read_model(family / "expert_02")
    mix = {n: 0.75 * first[n].double() + 0.25 * second[n].double() for n in first}
    ours = merged(home, text + SUFFIX)
    assert_same_logits(ours, assembled(tmp_path / "oracle", arch, mix))


@pytest.mark.parametrize("arch", CAUSAL)
def test_a_depth_up_scaled_model_computes_what_its_stacked_layers_compute(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path, arch: str
) -> None:
    family = family_of(arch)
    ours = merged(home, fill("merge_method: passthrough" + UP_SCALE, family))
    first, second = (read_model(family / f"expert_0{i}") for i in range(2))
    prefix = LAYER_PREFIX.get(arch, "model.layers.")
    # Embeddings are those of the first slice, head and last norm those of the last one.
    before = ("model.embed_tokens.", "transformer.wte.", "transformer.wpe.", "gpt_neox.embed_in.")
    stacked = {n: t for n, t in first.items() if n.startswith(before)}
    stacked |= {
        n: t for n, t in second.items() if not n.startswith(prefix) and not n.startswith(before)
    }
    origin = [(first, i) for i in range(3)] + [(second, i) for i in range(1, 4)]
    for layer, (model, source) in enumerate(origin):
        stem = f"{prefix}{source}."
        stacked |= {
            f"{prefix}{layer}.{n.removeprefix(stem)}": t
            for n, t in model.items()
            if n.startswith(stem)
        }
    oracle = assembled(tmp_path / "oracle", arch, stacked, layers=len(origin))
    config = json.loads((ours / "config.json").read_text())
    assert len(origin) in (config.get("num_hidden_layers"), config.get("n_layer"))
    if "layer_types" in config:
        kinds = json.loads((family / "base" / "config.json").read_text())["layer_types"]
        patched = json.loads((oracle / "config.json").read_text())
        patched["layer_types"] = kinds[0:3] + kinds[1:4]
        (oracle / "config.json").write_text(json.dumps(patched))
    assert torch.equal(logits(ours), logits(oracle))


@pytest.mark.peer
@pytest.mark.usefixtures("mergekit_is_here")
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("ties", "gpt2"),
        ("slerp-gradient", "mistral"),
        ("model_stock", "gemma2"),
        ("slices-shifted", "llama"),
        ("task_arithmetic", "mixtral"),
    ],
)
def test_our_model_computes_what_mergekits_model_computes(
    home: Warehouse, family_of: FamilyOf, tmp_path: Path, name: str, arch: str
) -> None:
    recipe = RECIPES[name]
    text = recipe.text(family_of(arch, recipe.stored, recipe.unchanged))
    run_mergekit(text, tmp_path / "peer")
    assert_same_logits(merged(home, text), tmp_path / "peer")


@pytest.fixture(scope="module")
def half_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied base and expert 1, and experts 0 and 2 with a head of their own."""
    folder = tmp_path_factory.mktemp("half_tied")
    tied = make("llama_tied", folder / "tied", 3)
    untied = make("llama", folder / "untied", 3)
    for model, source in {
        "base": tied,
        "expert_00": untied,
        "expert_01": tied,
        "expert_02": untied,
    }.items():
        shutil.copytree(source / model, folder / model)
    return folder


def test_a_tied_model_takes_part_in_the_head_with_its_embedding(
    home: Warehouse, half_tied: Path, tmp_path: Path
) -> None:
    text = fill(
        "merge_method: task_arithmetic\nbase_model: $base\nmodels:\n"
        "  - {model: $e0, parameters: {weight: 0.5}}\n"
        "  - {model: $e1, parameters: {weight: 0.25}}\n",
        half_tied,
    )
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    base, first, second = (read_model(half_tied / m) for m in ("base", "expert_00", "expert_01"))
    for model in (base, second):
        model[head] = model[embedding]
    mix = {
        n: base[n].double()
        + 0.5 * (first[n].double() - base[n].double())
        + 0.25 * (second[n].double() - base[n].double())
        for n in base
    }
    ours = merged(home, text + SUFFIX)
    assert not json.loads((ours / "config.json").read_text())["tie_word_embeddings"]
    assert_same_logits(ours, assembled(tmp_path / "oracle", "llama", mix))


@pytest.mark.peer
@pytest.mark.usefixtures("mergekit_is_here")
@pytest.mark.parametrize("name", ["ties", "slerp", "model_stock", "sce", "karcher"])
def test_heads_of_tied_and_untied_models_merge_as_in_mergekit(
    home: Warehouse, half_tied: Path, name: str
) -> None:
    text = RECIPES[name].text(half_tied)
    theirs, ours = run_mergekit(text), read_model(merged(home, text))
    assert ours.keys() == theirs.keys()
    assert "lm_head.weight" in ours
