"""`moe`: the mixtures that mergekit-moe makes, and what has no mixture is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mergepipe_pipeline.errors import IncompatibleCheckpointsError, MergePipeError, RecipeError
from mergepipe_pipeline.verbs.tools import moe
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse
from tests.tools.mixtures import (
    FAMILIES,
    LAYERS,
    TOKENIZERS,
    apart,
    digest,
    is_gate,
    make_family,
    read,
    write_config,
    write_tokenizer,
)
from tests.tools.record import RECORD


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    for arch in FAMILIES:
        make_family(folder / arch, arch)
    return folder


def gates_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {n: t.tolist() for n, t in tensors.items() if is_gate(n)}


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("mode", ["hidden", "cheap_embed"])
def test_a_mixture_is_mergekits_bit_for_bit_and_its_gates_are_its_gates_before_rounding(
    families: Path, home: Warehouse, arch: str, mode: str
) -> None:
    made = moe(home, write_config(families / arch, arch, mode))
    found, expected = apart(read(made.path)), json.loads(RECORD.read_text())["moe"][arch][mode]
    assert digest(found) == expected["digest"]
    assert gates_of(found).keys() == expected["gates"].keys()
    # mergekit runs the base, and takes means, in bfloat16; embeddings stay float32.
    most = 4e-3 if mode == "hidden" else 2e-6
    for name, gate in expected["gates"].items():
        torch.testing.assert_close(found[name], torch.tensor(gate), atol=most, rtol=0)
        cosines = torch.cosine_similarity(found[name], torch.tensor(gate))
        assert cosines.min() > 0.9999


@pytest.mark.parametrize("mode", ["hidden", "cheap_embed"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_prompts_begin_with_the_text_of_the_bos_token_and_have_no_other_special_token(
    families: Path, home: Warehouse, tmp_path: Path, tokenizer: str, mode: str
) -> None:
    """As in mergekit, whatever the tokenizer adds by itself."""
    family = Path(shutil.copytree(families / "mistral", tmp_path / "mistral"))
    write_tokenizer(family / "base", *TOKENIZERS[tokenizer])
    found = apart(read(moe(home, write_config(family, "mistral", mode)).path))
    expected = json.loads(RECORD.read_text())["moe-tokenizers"][tokenizer][mode]
    most = 4e-3 if mode == "hidden" else 2e-6
    for name, gate in apart({n: torch.tensor(g) for n, g in expected.items()}).items():
        torch.testing.assert_close(found[name], gate, atol=most, rtol=0)
        assert torch.cosine_similarity(found[name], gate).min() > 0.9999


@pytest.mark.parametrize("arch", FAMILIES)
def test_transformers_runs_a_mixture_with_random_gates_which_has_a_tokenizer_and_is_verified(
    families: Path, home: Warehouse, arch: str
) -> None:
    from transformers import AutoModelForCausalLM

    path = write_config(families / arch, arch, "random")
    made, again = moe(home, path), moe(home, path)
    assert made.snapshot_id == again.snapshot_id != moe(home, path, seed=1).snapshot_id
    assert verify(home, made.snapshot_id).nbytes > made.nbytes
    gates = torch.cat([t.flatten() for n, t in read(made.path).items() if is_gate(n)])
    assert 0.8 < float(gates.std()) < 1.2
    loaded: Any = AutoModelForCausalLM.from_pretrained(made.path, output_loading_info=True)
    model, told = loaded
    assert not any(told[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    assert model(torch.tensor([[1, 5, 6]])).logits.isfinite().all()
    assert (Path(made.path) / "tokenizer.json").exists()


def test_a_mixture_of_one_models_copies_says_what_the_model_says(
    families: Path, home: Warehouse, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    base = families / "mistral" / "base"
    config = {"base_model": str(base), "gate_mode": "random", "experts_per_token": 3}
    path = tmp_path / "m.yml"
    path.write_text(yaml.safe_dump({**config, "experts": [{"source_model": str(base)}] * 3}))
    made = moe(home, path, tmp_path / "out")
    ids = torch.tensor([[1, 5, 6, 7]])
    one, other = (AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (base, made.path))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_noise_and_scales_change_what_they_name(
    families: Path, home: Warehouse, tmp_path: Path
) -> None:
    path = write_config(families / "mistral", "mistral", "random")
    config = yaml.safe_load(path.read_text())
    config["experts"][0] |= {"noise_scale": 0.1, "residual_scale": 0.5}
    changed = tmp_path / "changed.yml"
    changed.write_text(yaml.safe_dump(config))
    one, other = (apart(read(moe(home, p).path)) for p in (path, changed))
    place = f"model.layers.{LAYERS - 1}.mlp.experts."
    for kind, scale in (("gate_proj", 1.0), ("up_proj", 1.0), ("down_proj", 0.5)):
        added = other[f"{place}0.{kind}.weight"] - scale * one[f"{place}0.{kind}.weight"]
        assert 0.09 * scale < float(added.std()) < 0.11 * scale
        assert torch.equal(one[f"{place}1.{kind}.weight"], other[f"{place}1.{kind}.weight"])


def _unknown_key(config: dict[str, Any]) -> None:
    config["experts"][0]["positive_prompt"] = ["x"]


def _no_prompts(config: dict[str, Any]) -> None:
    del config["experts"][1]["positive_prompts"]


def _too_many(config: dict[str, Any]) -> None:
    config["experts_per_token"] = 3


def _cancelling(config: dict[str, Any]) -> None:
    config["experts"][0]["positive_prompts"] = config["experts"][0]["negative_prompts"]


def _shared(config: dict[str, Any]) -> None:
    config["shared_experts"] = [config["experts"][1]]


def _other_kind(config: dict[str, Any]) -> None:
    config["experts"][1]["source_model"] = config["base_model"].replace("mistral", "qwen3")


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_unknown_key, RecipeError, r"unknown key.*; did you mean.*experts\[0\]\.positive_prompt"),
        (_no_prompts, RecipeError, r"positive_prompts are needed.*experts\[1\]"),
        (_too_many, RecipeError, "at most the number of experts"),
        (_cancelling, MergePipeError, "do not cancel, found a difference of zero"),
        (_shared, RecipeError, "give no mixture"),
        (_other_kind, RecipeError, "found mistral, qwen3, without"),
    ],
)
def test_what_gives_no_mixture_is_refused_and_leaves_nothing(
    families: Path,
    home: Warehouse,
    tmp_path: Path,
    spoil: Callable[[dict[str, Any]], None],
    error: type[MergePipeError],
    message: str,
) -> None:
    config = yaml.safe_load(
        write_config(families / "mistral", "mistral", "cheap_embed").read_text()
    )
    spoil(config)
    path = tmp_path / "m.yml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(error, match=message):
        moe(home, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_of_another_size_are_refused(
    families: Path, home: Warehouse, tmp_path: Path
) -> None:
    from tests.support.family import tensors_of, write_model

    small = write_model(tmp_path / "small", tensors_of(0, None), hidden=64)
    path = write_config(families / "mistral", "mistral", "random")
    config = yaml.safe_load(path.read_text())
    config["experts"][1]["source_model"] = str(small)
    path = tmp_path / "m.yml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(IncompatibleCheckpointsError, match="does not fit into the mixture"):
        moe(home, path)
