"""Quantisers' and trainers' own names tell codes and factors from plain numbers."""

from __future__ import annotations

import pytest

from mergepipe_pipeline.domain.stored_form import stored_form

CODED = {
    "hqq": {"W_q": "U8", "scale": "F16", "zero": "F16", "shape": "I32"},
    "torchao": {"_weight_qdata": "I8", "_weight_scale": "F16"},
    "gpt-oss as it was published": {"blocks": "U8", "scales": "U8"},
    "aqlm": {"codes": "I8", "codebooks": "F16", "scales": "F16"},
    "eetq": {"weight": "I8", "weight_scales": "F16"},
    "quanto": {"weight._data": "I8", "weight._scale": "F16"},
    "bitnet": {"weight": "U8", "weight_scale": "BF16"},
    "fp8 of experts in one tensor": {"gate_up_proj": "F8_E4M3", "gate_up_proj_scale_inv": "F32"},
    "integers alone": {"weight": "I8"},
}
PLAIN = {
    "fp8 without a scale": {"weight": "F8_E4M3"},
    "scales of a quantised cache": {"weight": "BF16", "k_scale": "F32", "v_scale": "F32"},
    "counts": {"weight": "F32", "num_batches_tracked": "I64", "running_mean": "F32"},
    "positions": {"position_ids": "I64", "weight": "F32"},
    "a table of offsets": {"relative_position_index": "I64", "logit_scale": "F32"},
    "an adapter's rank in a module's name": {"q_a_proj.weight": "BF16", "lora.0.weight": "BF16"},
}


@pytest.mark.parametrize("form", CODED)
def test_what_quantisers_write_is_known_as_codes(form: str) -> None:
    dtypes = {f"model.layers.0.mlp.{leaf}": dtype for leaf, dtype in CODED[form].items()}
    found = stored_form({**dtypes, "model.norm.weight": "BF16"}, {})
    assert found is not None
    assert found.coded == set(dtypes)


@pytest.mark.parametrize("form", PLAIN)
def test_plain_numbers_are_known_as_such(form: str) -> None:
    dtypes = {f"model.layers.0.self_attn.{leaf}": dtype for leaf, dtype in PLAIN[form].items()}
    assert stored_form(dtypes, {}) is None


def test_a_config_tells_codes_that_no_name_tells() -> None:
    config = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    found = stored_form({"a.weight": "F8_E4M3", "b.weight": "BF16"}, config)
    assert found is not None
    assert found.name == "fp8 in blocks"
    assert found.coded == {"a.weight"}
    assert stored_form({"b.weight": "BF16"}, config) is None
