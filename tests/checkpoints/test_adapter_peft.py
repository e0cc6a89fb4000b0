"""What the installed peft merges is what the views of its adapter say."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import nn

from mergepipe_pipeline.checkpoints.adapter import adapter_views
from mergepipe_pipeline.checkpoints.adapter_config import parse_adapter_config
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.errors import CheckpointError
from tests.checkpoints.adapters import PLAIN, Shapes, used, value
from tests.support.laws import examples

pytest.importorskip("peft")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=11,
            tie_word_embeddings=False,
        )
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=8,
            n_layer=1,
            n_head=2,
            vocab_size=11,
            n_positions=16,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
    )


def state(model: nn.Module) -> dict[str, np.ndarray]:
    return {k: v.detach().numpy().copy() for k, v in model.state_dict().items()}


def trained(folder: Path, model: nn.Module, **config: Any) -> Any:
    """A peft model with random factors, saved."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(**config))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
        adapted.save_pretrained(str(folder))
    return adapted


def shapes(tensors: Mapping[str, np.ndarray]) -> Shapes:
    return {name: tensor.shape for name, tensor in tensors.items()}


LLAMA_CASES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "k_proj", "down_proj"], "r": 3, "lora_alpha": 5},
    "rslora": {"target_modules": "all-linear", "r": 4, "use_rslora": True},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 3, r"layers\.1\..*_proj": 5},
        "alpha_pattern": {"q_proj": 7, "layers.1.self_attn.v_proj": 2, "_proj": 100},
        "use_rslora": True,
    },
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "r": 2, "lora_alpha": 3},
    "head": {"target_modules": ["lm_head"], "r": 2},
    "modules_to_save": {
        "target_modules": ["v_proj"],
        "modules_to_save": ["lm_head", "embed_tokens", "norm"],
    },
    "orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "mica": {"target_modules": ["q_proj"], "init_lora_weights": "mica", "r": 2},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
}


@pytest.mark.parametrize("case", LLAMA_CASES)
def test_views_of_an_adapter_are_what_peft_merges(tmp_path: Path, case: str) -> None:
    assert_views_are_what_peft_merges(tmp_path, llama(), LLAMA_CASES[case])


@pytest.mark.parametrize("targets", [["c_attn", "c_proj", "c_fc"], ["c_attn", "c_fc", "lm_head"]])
def test_views_of_conv1d_modules_are_transposed_as_peft_does(
    tmp_path: Path, targets: list[str]
) -> None:
    config = {"target_modules": targets, "fan_in_fan_out": True, "r": 2}
    assert_views_are_what_peft_merges(tmp_path, gpt2(), config)


def assert_views_are_what_peft_merges(
    folder: Path, model: nn.Module, config: dict[str, Any]
) -> None:
    base = state(model)
    merged = state(trained(folder, model, **config).merge_and_unload())
    checkpoint = open_checkpoint(str(folder), "a")
    factors = load_file(folder / "adapter_model.safetensors")
    views = adapter_views(checkpoint, shapes(base))
    assert views
    for name, tensor in base.items():
        if view := views.get(name):
            found = value(view, factors, tensor)
            assert (view.name, view.shape) == (name, tensor.shape)
            np.testing.assert_allclose(found, merged[name], rtol=1e-5, atol=1e-5)
            assert not np.array_equal(tensor, merged[name])
        else:
            np.testing.assert_array_equal(tensor, merged[name])
    assert sorted(n for view in views.values() for n in used(view)) == sorted(factors)


def test_square_tensors_of_an_adapter_of_both_kinds_are_refused(tmp_path: Path) -> None:
    base = shapes(state(gpt2()))
    trained(tmp_path, gpt2(), target_modules=["c_attn", "attn.c_proj", "lm_head"])
    with pytest.raises(CheckpointError, match=r"transposed or not.*c_proj\.weight is square"):
        adapter_views(open_checkpoint(str(tmp_path), "a"), base)


REFUSED_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "pissa": ({"init_lora_weights": "pissa_niter_2"}, r"\"pissa_niter_2\".*path_initial_model_for"),
    "lora_bias": ({"lora_bias": True}, r"a bias in lora_B.*lora_bias"),
    "layers": ({"layer_replication": [(0, 2), (0, 2)]}, "copies of the base's layers"),
}


@pytest.mark.parametrize("case", REFUSED_CASES)
def test_what_peft_saves_beyond_plain_lora_is_refused_by_name(tmp_path: Path, case: str) -> None:
    config, message = REFUSED_CASES[case]
    base = shapes(state(llama()))
    trained(tmp_path, llama(), target_modules=["q_proj"], r=2, **config)
    with pytest.raises(CheckpointError, match=message):
        adapter_views(open_checkpoint(str(tmp_path), "a"), base)


def test_a_converted_pissa_adapter_is_read_as_peft_reads_it(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    model = llama()
    base = state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(
            model, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights="pissa")
        )
        config: Any = adapted.peft_config["default"]
        config.init_lora_weights = True
        adapted.save_pretrained(str(tmp_path / "before"))
        config.init_lora_weights = "pissa"
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter))
        adapted.save_pretrained(
            str(tmp_path / "after"),
            path_initial_model_for_weight_conversion=str(tmp_path / "before"),
        )
        fresh = llama()
        fresh.load_state_dict({k: torch.from_numpy(v) for k, v in base.items()})
        merged = state(PeftModel.from_pretrained(fresh, str(tmp_path / "after")).merge_and_unload())
    views = adapter_views(open_checkpoint(str(tmp_path / "after"), "a"), base.keys())
    factors = load_file(tmp_path / "after" / "adapter_model.safetensors")
    for name, view in views.items():
        found = value(view, factors, base[name])
        np.testing.assert_allclose(found, merged[name], rtol=1e-5, atol=1e-5)


MODULES = st.lists(st.sampled_from(["model", "layers", "0", "1", "q_proj", "k_proj"]), min_size=1)


PATTERNS = st.sampled_from(["q_proj", "layers.0.q_proj", "^model", r".*\.k_proj", "0|1", "proj"])


@settings(max_examples=examples(50), deadline=None)
@given(
    MODULES.map(".".join),
    st.dictionaries(PATTERNS, st.integers(1, 64)),
    st.dictionaries(PATTERNS, st.integers(1, 64)),
    st.booleans(),
)
def test_rank_and_scale_of_a_module_are_peft_s(
    module: str, ranks: dict[str, int], alphas: dict[str, int], stable: bool
) -> None:
    from peft.utils.other import get_pattern_key

    text = json.dumps(
        PLAIN | {"rank_pattern": ranks, "alpha_pattern": alphas, "use_rslora": stable}
    )
    config = parse_adapter_config(text, "f")
    rank = ranks.get(get_pattern_key(list(ranks), module), 2)
    alpha = alphas.get(get_pattern_key(list(alphas), module), 4)
    assert config.rank_of(module) == rank
    assert config.scale_of(module) == alpha / (sqrt(rank) if stable else rank)
