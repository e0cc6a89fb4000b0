"""Names of one tensor in several versions, beside transformers' own conversion of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.tensor_names import any_version, plain_name

#: Classes that save tensors under other names than their modules have.
CLASSES = (
    "FuyuForCausalLM",
    "GraniteSpeechForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "PaddleOCRVLForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "T5Gemma2ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
)


def shallow(config: Any) -> Any:
    """The config with one or two layers in each part."""
    for key in ("num_hidden_layers", "encoder_layers", "num_layers", "depth", "num_global_layers"):
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, 2)
    for part in vars(config).values():
        if hasattr(part, "to_dict"):
            shallow(part)
    return config


@pytest.mark.parametrize("name", CLASSES)
def test_what_a_class_saves_and_what_its_modules_are_called_are_one(name: str) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(shallow(cls.config_class()))
    modules = model.state_dict()
    saved = revert_weight_conversion(model, dict(modules))
    forms = sorted(map(any_version, modules))
    assert saved.keys() != modules.keys()
    assert sorted(map(any_version, saved)) == forms
    assert len(set(forms)) == len(forms)


PARTS = st.sampled_from(["model", "layers", "0", "mlp", "module", "base_model", "lm_head"])
WRAPPERS = st.sampled_from(["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"])


@given(st.lists(st.one_of(PARTS, WRAPPERS), min_size=1, max_size=8))
def test_a_plain_name_has_no_wrapper_and_is_its_own(parts: list[str]) -> None:
    plain = plain_name(".".join([*parts, "weight"]))
    assert plain_name(plain) == plain
    assert "_wrapped_module" not in plain
    assert "_orig_mod" not in plain
    assert not plain.startswith(("module.", "base_model.model."))
    assert plain.endswith("weight")
